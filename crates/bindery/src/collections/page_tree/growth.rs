//! Creates the nodes on the path to a page and frees empty nodes.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use super::PageIndex;
use super::node::{IndexNode, Link, Nodes, level_of, slot};
use crate::platform::Platform;

impl PageIndex {
    /// Creates the missing nodes between the root and `page`. On failure, nodes created so far
    /// remain.
    pub(super) fn make_path<P: Platform>(&mut self, page: u64, nodes: &Nodes<'_, P>) -> Option<()> {
        let wanted = level_of(page);
        let mut at = match self.root {
            Some(root) => root,
            None => {
                let root = self.new_node(wanted, nodes)?;
                (self.root, self.level) = (Some(root), wanted as u32);
                root
            }
        };
        while self.level() < wanted {
            let root = self.new_node(self.level() + 1, nodes)?;
            let marks = self.node(at).marks();
            self.node_mut(root).set_child(0, Some(at));
            self.node_mut(root).mark(0, marks);
            self.root = Some(root);
            self.level += 1;
            at = root;
        }
        for level in (1..=self.level()).rev() {
            let index = slot(page, level);
            at = match self.node(at).child(index) {
                Some(child) => child,
                None => {
                    let child = self.new_node(level - 1, nodes)?;
                    self.node_mut(at).set_child(index, Some(child));
                    child
                }
            };
        }
        Some(())
    }

    /// Frees the nodes on the path to `page` that are empty or become so, and lowers the root to
    /// the height that the pages need.
    pub(super) fn free_empty<P: Platform>(&mut self, page: u64, nodes: &Nodes<'_, P>) {
        let path = self.path(page);
        for level in 0..=self.level() {
            let Some(link) = path[level] else { continue };
            if self.node(link).used != 0 {
                break;
            }
            match path.get(level + 1).copied().flatten() {
                Some(parent) => self.node_mut(parent).set_child(slot(page, level + 1), None),
                None => (self.root, self.level) = (None, 0),
            }
            // SAFETY: 1. the link to it was just cleared; the path is not used again here.
            unsafe { self.free_node(link, nodes) };
        }
        while let Some(root) = self.root
            && self.node(root).used == 1
            && let Some(child) = self.node(root).child(0)
        {
            self.root = Some(child);
            self.level -= 1;
            // SAFETY: 1. its child has replaced it as the root.
            unsafe { self.free_node(root, nodes) };
        }
    }

    /// A node that is not linked yet.
    fn new_node<P: Platform>(&mut self, level: usize, nodes: &Nodes<'_, P>) -> Option<Link> {
        let node = nodes.slab.allocate(nodes.frames, IndexNode::new(level))?;
        self.nodes += 1;
        Some(Link(node))
    }

    /// Frees a node.
    ///
    /// # Safety
    /// 1. No node links to it, it is not the root, and the caller does not use `link` again.
    unsafe fn free_node<P: Platform>(&mut self, link: Link, nodes: &Nodes<'_, P>) {
        // SAFETY: 1. `new_node` got this pointer from the same slab (obligation 1 of `Nodes::new`),
        // and nodes are freed only here, after they have left the tree. 2. The caller's obligation
        // 1; nodes are `Send`.
        unsafe { nodes.slab.free(nodes.frames, link.0) };
        self.nodes -= 1;
    }
}
