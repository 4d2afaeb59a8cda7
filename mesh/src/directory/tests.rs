use std::collections::{BTreeMap, HashSet};

use super::*;
use crate::transport::{FetchStage, Refusal};
use shm_protocol::random::Random;

const A: PeerNumber = PeerNumber(3);
const B: PeerNumber = PeerNumber(1);
const C: PeerNumber = PeerNumber(7);
const FAULT: Result<u64, FetchFault> = Err(FetchFault::Short);

fn keys(range: std::ops::Range<u64>) -> Vec<Digest> {
    range.map(|number| Digest(mix_bits(number + 1))).collect()
}

fn filter_of(keys: &[Digest]) -> Filter {
    let mut filter = Filter::with_capacity(keys.len() * 2);
    assert!(keys.iter().all(|key| filter.insert(*key)));
    filter
}

fn directory(peers: &[(PeerNumber, &[Digest])]) -> Directory {
    let mut directory = Directory::new(DirectoryConfig::default());
    for (peer, keys) in peers {
        directory.add_peer(*peer);
        directory.replace(*peer, filter_of(keys));
    }
    directory
}

fn asked(directory: &Directory, now_ms: u64, keys: &[Digest]) -> Vec<(PeerNumber, u32)> {
    directory.probe(now_ms, keys).iter().map(|candidate| (candidate.peer, candidate.run)).collect()
}

#[test]
fn the_longest_leading_run_comes_first_and_holes_end_it() {
    let all = keys(0..100);
    let holed: Vec<Digest> = all.iter().copied().filter(|key| *key != all[40]).collect();
    let directory = directory(&[(A, &all[..70]), (B, &all[1..]), (C, &holed)]);
    assert_eq!(asked(&directory, 0, &all), [(A, 70), (C, 40)]);
    assert_eq!(asked(&directory, 0, &all[1..]), [(B, 99), (A, 69), (C, 39)]);
    assert_eq!(asked(&directory, 0, &all[..1]).len(), 2);
    assert_eq!(asked(&directory, 0, &keys(500..600)), []);
    assert_eq!(asked(&directory, 0, &[]), []);
}

#[test]
fn among_equals_the_one_that_owes_least_then_each_node_another() {
    let all = keys(0..30);
    let mut directory = directory(&[(A, &all), (B, &all), (C, &all)]);
    directory.began(A, 5);
    directory.began(B, 2);
    directory.began(C, 3);
    let order =
        |directory: &Directory| asked(directory, 0, &all).iter().map(|(peer, _)| *peer).collect::<Vec<_>>();
    assert_eq!(order(&directory), [B, C, A]);
    (0..5).for_each(|_| directory.note_end(0, A, &Ok(1)));
    assert_eq!(order(&directory), [A, B, C]);

    let firsts: HashSet<PeerNumber> = (0..32)
        .map(|seed| {
            let mut directory = Directory::new(DirectoryConfig { seed, ..DirectoryConfig::default() });
            for peer in [A, B, C] {
                directory.add_peer(peer);
                directory.replace(peer, filter_of(&all));
            }
            order(&directory)[0]
        })
        .collect();
    assert_eq!(firsts.len(), 3);
}

#[test]
fn a_peer_that_lacks_what_it_announces_is_asked_after_the_others_for_a_time() {
    let all = keys(0..30);
    let mut directory = directory(&[(A, &all), (B, &all[..20]), (C, &all[..10])]);
    assert_eq!(asked(&directory, 0, &all), [(A, 30), (B, 20), (C, 10)]);
    (0..4).for_each(|at| directory.lacked(0, A, all[at]));
    directory.lacked(0, B, all[0]);
    assert_eq!(asked(&directory, 0, &all), [(C, 10), (B, 20), (A, 30)], "no run makes up for it");
    directory.gave(0, B, 1);
    assert_eq!(asked(&directory, 0, &all), [(B, 20), (C, 10), (A, 30)], "it has given as many");
    assert_eq!(asked(&directory, 30_000, &all), [(A, 30), (B, 20), (C, 10)], "with time it is forgotten");
    let totals: Vec<_> = directory.peers().map(|peer| (peer.peer, peer.absent_total)).collect();
    assert_eq!(totals, [(B, 1), (A, 4), (C, 0)]);
}

#[test]
fn a_block_that_a_thinned_inventory_does_not_speak_of_may_be_absent() {
    let all = keys(0..100);
    let thinning = Thinning::new(3).expect("few");
    let mut directory = directory(&[]);
    directory.add_peer(A);
    directory.replace(A, Filter::thinned(100, thinning));
    all.iter().filter(|key| !thinning.keeps(**key)).for_each(|key| directory.lacked(0, A, *key));
    assert_eq!(directory.peers().map(|peer| peer.absent_total).collect::<Vec<_>>(), [0]);
}

#[test]
fn a_peer_that_fails_is_left_alone_then_tried_and_others_take_its_place() {
    let all = keys(0..10);
    let mut directory = directory(&[(A, &all), (B, &all[..5])]);
    let limits = BreakerLimits::default();
    let mut faults = (0..u64::from(limits.strikes_max)).map(|number| number * limits.strike_ms);
    for now_ms in faults.clone() {
        assert_eq!(asked(&directory, now_ms, &all), [(A, 10), (B, 5)]);
        directory.began(A, 10);
        (0..10).for_each(|_| directory.note_end(now_ms, A, &FAULT));
    }
    let opened_ms = faults.next_back().expect("some");
    assert_eq!(asked(&directory, opened_ms, &all), [(B, 5)]);
    let trial_ms = opened_ms + limits.wait_ms_min;
    assert_eq!(asked(&directory, trial_ms, &all), [(A, 10), (B, 5)]);
    directory.began(A, 2);
    assert_eq!(asked(&directory, trial_ms, &all), [(B, 5)], "one trial at a time");
    directory.note_end(trial_ms, A, &Err(FetchFault::Absent));
    assert_eq!(asked(&directory, trial_ms, &all), [(A, 10), (B, 5)], "it answered");
    let stats: Vec<PeerStats> = directory.peers().collect();
    assert_eq!((stats[1].peer, stats[1].trips_total, stats[1].breaker_open), (A, 1, false));
    assert_eq!((stats[1].under_way, stats[1].keys, stats[0].keys), (1, 10, 5));
}

const MIB: u64 = 1 << 20;

/// Given three late fetches of each peer, with so many MiB from it: the number of peers whose breaker is open
/// at the end.
fn slow(given_mib: &[u64]) -> usize {
    let mut directory = directory(&[]);
    let peers: Vec<PeerNumber> = (0..given_mib.len() as u32).map(PeerNumber).collect();
    peers.iter().for_each(|peer| directory.add_peer(*peer));
    for since_ms in [10_000, 13_000, 16_000] {
        let before: Vec<u64> = peers.iter().map(|peer| directory.began(*peer, 2)).collect();
        let late_ms = since_ms + 2000;
        for (peer, mib) in peers.iter().zip(given_mib).filter(|(_, mib)| **mib > 0) {
            directory.note_end(late_ms - 1, *peer, &Ok(1));
            directory.gave(late_ms - 1, *peer, mib * MIB);
        }
        for (peer, before) in peers.iter().zip(before) {
            directory.note_end(late_ms, *peer, &Err(FetchFault::Timeout(FetchStage::Whole)));
            directory.late(late_ms, *peer, since_ms, before);
        }
    }
    directory.peers().filter(|peer| peer.breaker_open).count()
}

#[test]
fn a_peer_that_gives_little_is_left_alone_though_it_has_just_answered() {
    assert_eq!([slow(&[64]), slow(&[63])], [0, 1]);
}

#[test]
fn peers_that_share_the_link_need_not_give_more_than_an_equal_part() {
    assert_eq!([slow(&[40; 8]), slow(&[8; 8]), slow(&[7; 8])], [0, 0, 8]);
    assert_eq!(slow(&[40, 40, 40, 40, 40, 40, 40, 7]), 1, "the one that gave less");
    assert_eq!(slow(&[40, 0, 0]), 3, "those that give nothing take no part");
}

#[test]
fn what_a_peer_gave_before_a_fetch_or_to_others_is_no_part_of_it() {
    let mut directory = directory(&[(A, &[]), (B, &[])]);
    for since_ms in [10_000, 13_000, 16_000] {
        directory.gave(since_ms - 1, A, 64 * MIB);
        directory.gave(since_ms - 1, B, 64 * MIB);
        let before = directory.began(A, 1);
        directory.gave(since_ms, A, 63 * MIB);
        directory.late(since_ms + 2000, A, since_ms, before);
    }
    assert_eq!(directory.peers().map(|peer| peer.trips_total).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_promise_holds_until_another_word_of_its_peer_or_while_that_may_be_asked() {
    let all = keys(0..10);
    let mut directory = directory(&[(A, &[]), (B, &[])]);
    let promised = |directory: &Directory, now_ms, range: std::ops::Range<usize>| {
        !directory.promisers(now_ms, all[range].iter().copied()).is_empty()
    };
    assert!(!directory.replace_promises(A, vec![all[9]]), "it had promised nothing");
    assert!(!directory.replace_promises(A, vec![all[5], all[9]]), "one more");
    assert!(!directory.replace_promises(C, vec![all[0]]), "no member");
    assert!(promised(&directory, 0, 0..6) && promised(&directory, 0, 9..10));
    assert!(!promised(&directory, 0, 0..5), "a prompt is found by its last key, at members alone");
    assert_eq!(directory.peers().map(|peer| peer.promises).collect::<Vec<_>>(), [0, 2]);
    assert!(directory.replace_promises(A, vec![all[9]]));
    assert!(!promised(&directory, 0, 0..6));
    for strike in 0..3 {
        directory.began(A, 1);
        directory.note_end(strike * 1000, A, &FAULT);
    }
    assert!(!promised(&directory, 2000, 9..10), "it is left alone");
    assert!(promised(&directory, 3000, 9..10));
    assert!(!directory.replace_promises(B, vec![all[3]]));
    directory.remove_peer(A);
    assert!(!promised(&directory, 3000, 9..10) && promised(&directory, 3000, 0..10));
}

#[test]
fn one_peer_s_run_is_followed_in_parts_and_the_last_promised_key_is_found() {
    let all = keys(0..400);
    let mut directory = directory(&[(A, &all[..70]), (B, &[])]);
    assert_eq!(
        [directory.leading(A, &all[..64]), directory.leading(A, &all[64..128])],
        [(64, true), (6, false)]
    );
    assert_eq!([directory.leading(B, &all), directory.leading(C, &all)], [(0, false); 2]);
    assert_eq!(directory.leading(A, &[]), (0, true));
    // One block in eight is announced: the run reaches to the last of these.
    let thinning = Thinning::new(3).unwrap();
    let places: Vec<usize> = (0..400).filter(|place| thinning.keeps(all[*place])).collect();
    let mut filter = Filter::thinned(100, thinning);
    assert!(places[..5].iter().all(|place| filter.insert(all[*place])));
    directory.replace(A, filter);
    assert_eq!(directory.leading(A, &all), (places[4] + 1, false));
    assert_eq!(directory.leading(A, &all[..places[5]]), (places[4] + 1, true));
    assert_eq!(directory.leading(A, &all[..places[0]]), (0, true), "nothing is said of these");

    assert!(!directory.has_promises());
    assert!(!directory.replace_promises(A, vec![all[3], all[9]]) && directory.has_promises());
    let found = [0..9, 0..400, 4..9].map(|range| directory.promised_place(0, &all[range]));
    assert_eq!(found, [Some(3), Some(9), None]);
    (0..3).for_each(|_| _ = directory.credit_mut(A).unwrap().break_promise(0));
    assert_eq!(directory.promised_place(0, &all), None, "it breaks its promises");
}

#[test]
fn changes_follow_a_snapshot_and_an_overfull_filter_says_so_once() {
    let all = keys(0..2000);
    let mut directory = Directory::new(DirectoryConfig::default());
    let added: Vec<DigestChange> = all.iter().map(|key| DigestChange::Added(*key)).collect();
    assert!(directory.apply(A, &added), "of nobody");
    directory.add_peer(A);
    assert!(directory.apply(A, &added), "before its snapshot");
    assert_eq!(asked(&directory, 0, &all), []);

    let mut filter = Filter::with_capacity(100);
    let capacity = filter.capacity();
    assert!(all[..10].iter().all(|key| filter.insert(*key)));
    directory.replace(A, filter);
    assert!(directory.apply(A, &added[10..100]));
    assert_eq!(asked(&directory, 0, &all[..100]), [(A, 100)]);
    assert!(!directory.apply(A, &added[100..capacity + 1]));
    assert!(directory.apply(A, &added[capacity + 1..]), "said once");
    assert!(directory.apply(A, &[DigestChange::Removed(all[50])]));
    assert_eq!(asked(&directory, 0, &all[..100]), [(A, 50)]);

    directory.add_peer(A);
    assert_eq!(directory.peers().next().expect("one").keys, capacity - 1, "joined twice");
    directory.replace(A, filter_of(&all));
    assert_eq!(asked(&directory, 0, &all), [(A, 2000)]);
    let changes = [DigestChange::Removed(all[0]), DigestChange::Added(all[0]), DigestChange::Removed(all[1])];
    assert!(directory.apply(A, &changes));
    assert_eq!(asked(&directory, 0, &all), [(A, 1)]);
    directory.remove_peer(A);
    assert_eq!(asked(&directory, 0, &all), []);
    directory.remove_peer(A);
    directory.began(A, 1);
    directory.note_end(0, A, &Err(FetchFault::Refused(Refusal::NotMember)));
    assert_eq!(directory.peers().count(), 0);
}

#[test]
fn a_prefix_that_every_peer_has_costs_no_more_than_the_limit() {
    let all = keys(0..1000);
    let peers: Vec<PeerNumber> = (0..50).map(PeerNumber).collect();
    let mut directory = Directory::new(DirectoryConfig::default());
    for peer in &peers {
        directory.add_peer(*peer);
        directory.replace(*peer, filter_of(&all[..900 + peer.0 as usize]));
    }
    let found = asked(&directory, 0, &all);
    assert_eq!(found.len(), LOOKUPS_MAX.div_ceil(1000));
    assert_eq!(asked(&directory, 0, &all[..100]).len(), DirectoryConfig::default().candidates_max);
    assert_eq!(asked(&directory, 0, &all[..1]).len(), DirectoryConfig::default().candidates_max);
}

#[test]
fn of_each_inventory_the_first_key_that_is_spoken_of_tells_whether_a_run_is_there() {
    let (all, others) = (keys(0..400), keys(500..900));
    let thinning = Thinning::new(3).expect("few");
    let kept: Vec<usize> = (0..400).filter(|at| thinning.keeps(all[*at])).collect();
    let mut directory = directory(&[(A, &all[..1])]);
    let may_have = |directory: &Directory, keys: &[Digest]| directory.may_have(0, keys.iter().copied());
    assert!(may_have(&directory, &all) && !may_have(&directory, &all[1..]) && !may_have(&directory, &[]));
    let mut thinned = Filter::thinned(kept.len(), thinning);
    assert!(thinned.insert(all[kept[1]]));
    directory.add_peer(B);
    directory.replace(B, thinned);
    let (first, second) = (kept[0], kept[1]);
    assert!(!may_have(&directory, &all[1..]), "it has not the first that it would speak of");
    assert!(may_have(&directory, &all[first + 1..]) && may_have(&directory, &all[second..]));
    assert!(!may_have(&directory, &all[second + 1..]) && !may_have(&directory, &others));
    for strike in 0..3 {
        directory.began(B, 1);
        directory.note_end(strike * 1000, B, &FAULT);
    }
    assert!(!may_have(&directory, &all[second..]), "it is left alone");
}

#[test]
fn of_a_thinned_inventory_a_run_reaches_to_the_last_key_that_is_spoken_of() {
    let all = keys(0..400);
    let thinning = Thinning::new(3).expect("few");
    let kept: Vec<usize> = (0..400).filter(|at| thinning.keeps(all[*at])).collect();
    assert!((25..100).contains(&kept.len()), "one in eight");
    let mut thinned = Filter::thinned(kept.len(), thinning);
    assert!(kept[..20].iter().all(|at| thinned.insert(all[*at])));
    let mut directory = directory(&[(A, &all[..kept[10]])]);
    directory.add_peer(B);
    directory.replace(B, thinned);
    assert_eq!(asked(&directory, 0, &all), [(B, kept[19] as u32 + 1), (A, kept[10] as u32)]);
    let middle = &all[kept[5]..kept[8]];
    assert_eq!(asked(&directory, 0, middle), [(A, middle.len() as u32), (B, (kept[7] - kept[5]) as u32 + 1)]);
    let gap = &all[kept[5] + 1..kept[6]];
    assert_eq!(asked(&directory, 0, gap).len(), usize::from(!gap.is_empty()), "none of these is spoken of");
    assert_eq!(asked(&directory, 0, &all[kept[20]..]), []);
}

/// Filters against sets: each filter has the blocks of its set, and hardly more.
#[test]
fn random_peers_are_found_by_what_they_have() {
    for seed in 0..10 {
        let mut random = Random(seed);
        let universe = keys(0..3000);
        let mut directory =
            Directory::new(DirectoryConfig { candidates_max: 16, ..DirectoryConfig::default() });
        let mut model: BTreeMap<PeerNumber, HashSet<Digest>> = BTreeMap::new();
        let mut wrong = 0;
        for _ in 0..400 {
            let peer = PeerNumber(random.next() as u32 % 12);
            let from = random.next() as usize % 2000;
            let range = from..from + 1 + random.next() as usize % 900;
            match random.next() % 8 {
                0 => {
                    directory.add_peer(peer);
                    directory.replace(peer, Filter::with_capacity(3000));
                    model.insert(peer, HashSet::new());
                }
                1 => {
                    directory.remove_peer(peer);
                    model.remove(&peer);
                }
                2..5 => {
                    let Some(set) = model.get_mut(&peer) else { continue };
                    let mut change = |key: &Digest, add: bool| match add {
                        true => set.insert(*key).then_some(DigestChange::Added(*key)),
                        false => set.remove(key).then_some(DigestChange::Removed(*key)),
                    };
                    let add = !random.next().is_multiple_of(3);
                    let changes: Vec<DigestChange> =
                        universe[range].iter().filter_map(|key| change(key, add)).collect();
                    assert!(directory.apply(peer, &changes));
                }
                _ => {
                    let asked_for = &universe[range];
                    let found: BTreeMap<PeerNumber, u32> =
                        asked(&directory, 0, asked_for).into_iter().collect();
                    let is_in =
                        |set: &HashSet<Digest>| asked_for.iter().take_while(|key| set.contains(key)).count();
                    for (peer, set) in &model {
                        let (run, said) = (is_in(set), found.get(peer).copied().unwrap_or(0) as usize);
                        let left_out = said == 0 && found.len() >= LOOKUPS_MAX / asked_for.len();
                        assert!(said >= run || left_out, "seed {seed}: {peer:?} has {run}, not {said}");
                        wrong += usize::from(said > run);
                    }
                }
            }
        }
        assert!(wrong < 10, "seed {seed}: {wrong} runs too long");
    }
}
