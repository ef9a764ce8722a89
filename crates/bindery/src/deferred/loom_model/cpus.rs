//! Models with several CPUs: the number that one CPU advances for all, a queue for each CPU, and
//! CPUs that are brought online and taken offline.

use super::*;

/// Frees by the grace period number that [`advance`] advances.
fn remove_by_number(world: &World) {
    world.remove(0);
    world.free_ripe(0);
    world.free_ripe(0);
}

fn advance(world: &World) {
    world.look_at_seats();
    world.look_at_seats();
}

fn put_off_and_drain(world: &World) {
    world.linked[0].store(false, Ordering::Release);
    world.put_off(0);
    world.drain();
    world.assert_freed(0);
}

fn free_ripe(world: &World) {
    world.free_ripe(0);
}

fn hand_over(world: &World) {
    world.hand_over();
}

fn hand_over_and_drain(world: &World) {
    world.hand_over();
    world.drain();
}

/// The CPU of the second queue.
fn remove_and_hand_over(world: &World) {
    world.remove(0);
    world.hand_over();
    world.free_ripe(1);
}

fn remove_if_only_cpu(world: &World) {
    world.remove_if_only_cpu(0);
}

/// A read section of a platform that needs no fence at its beginning.
fn read_without_fence(world: &World) {
    if world.linked[0].load(Ordering::Acquire) {
        // SAFETY: the cell reports a concurrent write.
        let freed = world.records[0].with(|freed| unsafe { *freed });
        assert_eq!(freed, 0, "found and freed");
        world.seen.read.store(true, Relaxed);
    }
}

fn come_online_and_read(world: &World) {
    world.come_online();
    read_without_fence(world);
}

fn read_and_go_offline(world: &World) {
    read_without_fence(world);
    world.go_offline();
}

fn numbered(omit: Omit) -> Scene {
    Scene { is_numbered: true, ..Scene::but_for(omit) }
}

#[test]
fn one_cpu_advances_the_number_for_another() {
    let work: [Work; 3] = [remove_by_number, read_first, advance];
    let seen = explore_scene(numbered(Omit::Nothing), work);
    assert!(seen.read.load(Relaxed) && seen.put_off.load(Relaxed) && seen.ripe.load(Relaxed));
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn a_number_without_a_fence_misses_a_reader() {
    explore_scene(numbered(Omit::FenceBeforeNumber), [remove_by_number, read_first, advance]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn a_number_without_acquire_hides_a_section() {
    explore_scene(numbered(Omit::AcquireNumber), [remove_by_number, read_first, advance]);
}

fn two_queues(omit: Omit) -> Scene {
    Scene { queues: 2, ..Scene::but_for(omit) }
}

#[test]
fn items_that_are_handed_over_are_safe() {
    let seen = explore_scene(two_queues(Omit::Nothing), [remove_and_hand_over, read_first]);
    assert!(seen.read.load(Relaxed) && seen.handed_over.load(Relaxed));
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn items_handed_over_as_ripe_are_read() {
    explore_scene(two_queues(Omit::PeriodAnew), [remove_and_hand_over, read_first]);
}

#[test]
fn a_drain_finds_items_that_are_handed_over() {
    let seen = explore_scene(two_queues(Omit::Nothing), [put_off_and_drain, hand_over]);
    assert!(seen.handed_over.load(Relaxed));
}

#[test]
#[should_panic]
fn a_drain_without_restart_misses_items() {
    // The drain has passed the second queue, and the first queue is empty when the drain reaches
    // it.
    explore_scene(two_queues(Omit::DrainAgain), [put_off_and_drain, hand_over]);
}

#[test]
fn two_drains_free_each_record_once() {
    let seen = explore_scene(two_queues(Omit::Nothing), [put_off_and_drain, hand_over_and_drain]);
    assert!(seen.handed_over.load(Relaxed) && seen.waited.load(Relaxed));
}

#[test]
fn a_drain_waits_for_a_thread_that_frees() {
    let seen = explore(Omit::Nothing, [put_off_and_drain, free_ripe]);
    assert!(seen.ripe.load(Relaxed) && seen.waited.load(Relaxed));
}

#[test]
#[should_panic]
fn a_drain_without_waiting_ends_early() {
    explore(Omit::WaitForFreeing, [put_off_and_drain, free_ripe]);
}

#[test]
fn the_only_cpu_frees_at_once() {
    let seen = explore(Omit::Nothing, [remove_if_only_cpu, come_online_and_read]);
    assert!(seen.freed_at_once.load(Relaxed) && seen.put_off.load(Relaxed));
    assert!(seen.read.load(Relaxed));
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn an_unfenced_unlinking_misses_the_new_cpu() {
    explore(Omit::FenceBeforeOnline, [remove_if_only_cpu, come_online_and_read]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn an_unfenced_new_cpu_finds_freed_items() {
    explore(Omit::FenceAfterOnline, [remove_if_only_cpu, come_online_and_read]);
}

fn two_cpus(omit: Omit) -> Scene {
    Scene { online: 2, ..Scene::but_for(omit) }
}

#[test]
fn the_last_cpu_online_frees_at_once() {
    let seen = explore_scene(two_cpus(Omit::Nothing), [remove_if_only_cpu, read_and_go_offline]);
    assert!(seen.freed_at_once.load(Relaxed) && seen.read.load(Relaxed));
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn an_offline_cpu_reads_without_release() {
    explore_scene(two_cpus(Omit::ReleaseAtOffline), [remove_if_only_cpu, read_and_go_offline]);
}
