use super::*;

#[test]
fn the_table_hands_out_what_is_free() {
    let requests = RequestTable::new();
    let free = |number| {
        let (group, number) = requests.group(number);
        group.free(number);
    };
    let all = core::iter::from_fn(|| requests.take(None)).collect::<std::vec::Vec<_>>();
    assert!(all.iter().copied().eq(0..REQUESTS as u32) && !requests.has_free());
    free(31);
    free(7);
    let takes = || requests.take(Some(Cpu(3)));
    assert_eq!((takes(), takes(), takes()), (Some(31), Some(7), None));
    (0..REQUESTS as u32).for_each(free);
    assert!(requests.is_idle() && requests.has_free());
    assert_eq!(requests.take(Some(Cpu(11))), Some(12), "the group of the CPU is used first");
}

#[test]
fn a_cpu_finds_its_own_completions() {
    let requests = RequestTable::new();
    for cpu in [2, 5] {
        let (group, number) = requests.group(requests.take(Some(Cpu(cpu))).unwrap());
        group.begin(number, Frame(9), 0);
        group.complete(number, SwapOperation::Write, false);
    }
    assert_eq!(requests.take_done(Some(Cpu(3))), 0);
    assert_eq!(requests.take_done(Some(Cpu(2))), 1 << 8);
    assert_eq!(requests.take_done(None), 1 << 20);
}

#[test]
fn requests_of_an_overflowed_group_are_found() {
    let requests = RequestTable::new();
    let begin = |cpu| {
        let number = requests.take(Some(Cpu(cpu))).unwrap();
        let (group, number_there) = requests.group(number);
        group.begin(number_there, Frame(9), 0);
        number
    };
    let complete = |number| {
        let (group, number) = requests.group(number);
        group.complete(number, SwapOperation::Write, false);
    };
    let end = |number, cpu| {
        complete(number);
        assert_eq!(requests.take_done(Some(Cpu(cpu))), 1 << number);
        let (group, number) = requests.group(number);
        group.free(number);
    };
    let taken: std::vec::Vec<_> = (0..5).map(|_| begin(2)).collect();
    assert_eq!(taken, [8, 9, 10, 11, 12], "one of the next group");
    // The CPUs that use this group first may never call, so from now on each CPU checks all groups.
    end(12, 2);
    end(8, 6);
    // A new request keeps the table in this state, even after all others of the group have ended.
    let new = begin(2);
    (9..12).for_each(|number| end(number, 6));
    end(new, 5);
    assert_eq!(requests.take_done(Some(Cpu(5))), 0, "the device is idle");
    let last = begin(2);
    complete(last);
    assert_eq!(requests.take_done(Some(Cpu(6))), 0, "each CPU looks at its own group again");
    assert_eq!(requests.take_done(Some(Cpu(2))), 1 << last);
}

#[test]
fn a_look_at_all_groups_overflows_none() {
    let requests = RequestTable::new();
    let (group, number) = requests.group(requests.take(Some(Cpu(2))).unwrap());
    group.begin(number, Frame(9), 0);
    assert_eq!(requests.take_done(None), 0);
    group.complete(number, SwapOperation::Write, false);
    assert_eq!(requests.take_done(Some(Cpu(6))), 0);
    // A CPU that goes offline leaves its requests to the other CPUs.
    requests.share_group(Cpu(2));
    assert_eq!(requests.take_done(Some(Cpu(6))), 1 << 8);
}

#[test]
fn an_offline_cpus_late_request_is_found() {
    let requests = RequestTable::new();
    let end = |cpu, by| {
        let number = requests.take(Some(Cpu(cpu))).unwrap();
        let (group, number_there) = requests.group(number);
        group.begin(number_there, Frame(9), 0);
        group.complete(number_there, SwapOperation::Write, false);
        let found = requests.take_done(Some(Cpu(by))) == 1 << number;
        // Makes the table ready for the next request.
        requests.take_done(None);
        group.free(number_there);
        found
    };
    requests.adopt_group(Cpu(0));
    requests.share_group(Cpu(2));
    assert_eq!(requests.take_done(Some(Cpu(6))), 0, "the device is idle");
    // A thread read its CPU number before the CPU went offline.
    assert!(end(2, 6) && end(2, 5));
    // The end of an overflow does not change this.
    requests.note_overflow();
    assert_eq!(requests.take_done(Some(Cpu(6))), 0, "the device is idle again");
    assert!(end(2, 6) && !end(3, 6));
    assert!(RequestTable::share_a_group(Cpu(2), Cpu(10)));
    requests.adopt_group(Cpu(10));
    assert!(!end(2, 6) && end(2, 10));
}

#[test]
fn requests_of_threads_without_a_cpu_are_found() {
    let requests = RequestTable::new();
    let (group, number) = requests.group(requests.take(None).unwrap());
    group.begin(number, Frame(9), 0);
    group.complete(number, SwapOperation::Write, false);
    assert_eq!(requests.take_done(Some(Cpu(6))), 1, "no CPU has the first group");
}

#[test]
fn a_write_is_done_with_its_last_piece() {
    for failed in [false, true] {
        let requests = Group::new();
        let number = requests.take().unwrap();
        requests.begin(number, Frame(9), 0);
        requests.add_piece(number);
        requests.complete(number, SwapOperation::Write, failed);
        requests.add_piece(number);
        requests.complete(number, SwapOperation::Write, false);
        assert_eq!((requests.take_done(), requests.result(number)), (0, None));
        requests.complete(number, SwapOperation::Write, false);
        assert!(requests.take_done_one(number) && !requests.take_done_one(number));
        assert_eq!(requests.take_done(), 0);
        assert_eq!((requests.result(number), requests.head(number)), (Some(!failed), Frame(9)));
    }
}

#[test]
fn an_unawaited_read_is_for_all() {
    for failed in [false, true] {
        let requests = Group::new();
        let number = requests.take().unwrap();
        requests.begin_around(number, Frame(1));
        requests.add_piece(number);
        requests.complete(number, SwapOperation::Read, failed);
        assert_eq!((requests.take_done(), requests.result(number)), (0, None));
        requests.complete(number, SwapOperation::Read, false);
        assert_eq!((requests.take_done(), requests.result(number)), (1, Some(!failed)));
        assert!(requests.is_around(number));
    }
}

#[test]
fn a_read_is_for_its_reader_alone() {
    let requests = Group::new();
    let number = requests.take().unwrap();
    requests.begin(number, Frame(1), 0);
    requests.complete(number, SwapOperation::Read, true);
    assert_eq!((requests.take_done(), requests.result(number)), (0, Some(false)));
}
