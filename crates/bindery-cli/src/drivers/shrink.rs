//! Shrinks a list of steps to a short one that still fails.

use super::step::Step;

/// Shortens the list while `fails` is true for the rest. Leaves out pieces of half the list's
/// length, then of a quarter, down to single steps. Stops early after `tries`.
pub fn shrink(
    mut steps: Vec<Step>,
    tries: usize,
    mut fails: impl FnMut(&[Step]) -> bool,
) -> Vec<Step> {
    let mut left = tries;
    let mut piece = steps.len().div_ceil(2);
    while piece > 0 {
        let mut at = 0;
        let before = steps.len();
        while at < steps.len() {
            if left == 0 {
                return steps;
            }
            left -= 1;
            let end = (at + piece).min(steps.len());
            let without: Vec<_> = [&steps[..at], &steps[end..]].concat();
            if fails(&without) {
                steps = without;
            } else {
                at = end;
            }
        }
        // The removal of single steps may allow the removal of others.
        let again = piece == 1 && steps.len() < before;
        piece = if again { 1 } else { piece / 2 };
    }
    simplify(steps, left, fails)
}

/// Replaces numbers by simpler ones while the list still fails.
fn simplify(
    mut steps: Vec<Step>,
    mut left: usize,
    mut fails: impl FnMut(&[Step]) -> bool,
) -> Vec<Step> {
    for number in 0..steps.len() {
        for simpler in simpler(&steps[number]) {
            if left == 0 {
                return steps;
            }
            left -= 1;
            let old = std::mem::replace(&mut steps[number], simpler);
            if !fails(&steps) {
                steps[number] = old;
            }
        }
    }
    steps
}

/// Variants of the step that do less.
fn simpler(step: &Step) -> Vec<Step> {
    if let Step::Fill { process, at, pages, value } = *step {
        let fewer = [1, 4, 16, 64].into_iter().filter(|fewer| *fewer < pages).rev();
        return fewer.map(|pages| Step::Fill { process, at, pages, value }).collect();
    }
    if let Step::Call { process: 1.., call, arguments } = *step {
        return vec![Step::Call { process: 0, call, arguments }];
    }
    if let Step::Reclaim { pages: 33.. } = *step {
        return vec![Step::Reclaim { pages: 32 }];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_fail_the_list_stay() {
        let pages = |pages| Step::Reclaim { pages };
        let steps: Vec<_> = (0..200).map(pages).collect();
        // This models a defect that needs three steps in order.
        let fails = |steps: &[Step]| {
            let mut needed = [pages(17), pages(90), pages(91)].into_iter().peekable();
            for step in steps {
                needed.next_if_eq(step);
            }
            needed.peek().is_none()
        };
        let mut tries = 0;
        let shrunk = shrink(steps, 1000, |steps| {
            tries += 1;
            fails(steps)
        });
        assert_eq!(shrunk, [pages(17), pages(90), pages(91)]);
        assert!(tries < 100, "{tries}");
    }

    #[test]
    fn shrinking_ends_after_so_many_tries() {
        let mut tries = 0;
        let shrunk = shrink(vec![Step::Trim; 64], 5, |_| {
            tries += 1;
            false
        });
        assert_eq!((shrunk.len(), tries), (64, 5));
    }
}
