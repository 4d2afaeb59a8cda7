use std::collections::HashSet;

use super::*;
use crate::directory::Filter;
use shm_protocol::random::{Random, mix};

const KEYS_MAX: usize = 1_000_000;
const CHANGES_MAX: usize = 1 << 16;

fn digest(number: u64) -> Digest {
    Digest(mix(number + 1))
}

fn added(range: std::ops::Range<u64>) -> Vec<Change> {
    range.map(|number| Change::Added(digest(number))).collect()
}

fn removed(range: std::ops::Range<u64>) -> Vec<Change> {
    range.map(|number| Change::Removed(digest(number))).collect()
}

fn feed_of(keys: u64) -> Feed {
    let mut feed = Feed::new(CHANGES_MAX);
    feed.apply(&added(0..keys));
    feed.seal();
    feed
}

/// A copy of one node's inventory at a follower.
struct Copy {
    reader: Reader,
    follower: Follower,
    filter: Option<Filter>,
    promises: Option<Vec<Digest>>,
    snapshots: usize,
}

impl Copy {
    fn new(feed: &Feed, thinning: Thinning) -> Self {
        let follower = Follower::new(KEYS_MAX);
        let reader = feed.reader(thinning, None).hearing_promises();
        Self { reader, follower, filter: None, promises: None, snapshots: 0 }
    }

    /// Applies the next message, if there is one.
    fn step(&mut self, feed: &Feed) -> bool {
        let Some(message) = feed.next(&mut self.reader) else { return false };
        match self.follower.hear(message).expect("a feed's own message") {
            Heard::Nothing => {}
            Heard::Snapshot(filter) => {
                self.filter = Some(filter);
                self.snapshots += 1;
            }
            Heard::Changes(changes) => {
                let filter = self.filter.as_mut().expect("changes follow a snapshot");
                amended(filter, &changes);
            }
            Heard::Promises(promises) => self.promises = Some(promises),
        }
        true
    }

    fn catch_up(&mut self, feed: &Feed) {
        while self.step(feed) {}
    }
}

fn amended(filter: &mut Filter, changes: &[Change]) {
    for change in changes {
        assert!(match change {
            Change::Added(digest) => filter.insert(*digest),
            Change::Removed(digest) => filter.remove(*digest),
        });
    }
}

/// The copy has all of the model within its thinning, and as many keys: nothing else.
fn assert_equal(copy: &Copy, model: &HashSet<Digest>, what: &str) {
    let filter = copy.filter.as_ref().expect("told");
    let kept: Vec<&Digest> = model.iter().filter(|digest| filter.thinning().keeps(**digest)).collect();
    assert_eq!(filter.len(), kept.len(), "{what}");
    assert!(kept.iter().all(|digest| filter.contains(**digest)), "{what}");
}

#[test]
fn a_follower_is_told_all_and_then_what_changes() {
    let mut feed = feed_of(70_000);
    let mut copy = Copy::new(&feed, Thinning::NONE);
    assert_eq!(copy.follower.known(), None);
    copy.catch_up(&feed);
    let mut model: HashSet<Digest> = (0..70_000).map(digest).collect();
    assert_equal(&copy, &model, "the snapshot");
    assert_eq!(copy.follower.known(), Some(feed.sequence));

    feed.apply(&removed(0..100));
    feed.apply(&added(80_000..80_050));
    copy.catch_up(&feed);
    assert_equal(&copy, &model, "nothing is sent before the batch is sealed");
    feed.seal();
    copy.catch_up(&feed);
    model.extend((80_000..80_050).map(digest));
    model.retain(|key| !(0..100).map(digest).any(|gone| gone == *key));
    assert_equal(&copy, &model, "the change");
    assert_eq!(copy.snapshots, 1);
}

#[test]
fn promises_are_told_whole_behind_all_else_to_who_hears_them() {
    let mut feed = feed_of(70_000);
    let mut copy = Copy::new(&feed, Thinning::MOST);
    let mut deaf = feed.reader(Thinning::NONE, Some(feed.sequence));
    feed.promise(vec![digest(1)]);
    copy.catch_up(&feed);
    assert_eq!(copy.promises, Some(vec![]), "promises are sent with the next batch");
    assert!(feed.is_told(&copy.reader));
    feed.apply(&added(80_000..80_001));
    feed.promise(vec![digest(1), digest(2)]);
    feed.seal();
    assert!(!feed.is_told(&copy.reader));
    // A resumed reader gets the new block first, then the promises.
    let expected = Message::Promises(vec![digest(1), digest(2)]);
    copy.reader = feed.reader(Thinning::NONE, Some(feed.sequence - 1)).hearing_promises();
    assert!(matches!(feed.next(&mut copy.reader), Some(Message::Delta { .. })), "the block first");
    assert!(!feed.is_told(&copy.reader));
    assert_eq!(feed.next(&mut copy.reader), Some(expected.clone()));
    assert!(feed.is_told(&copy.reader) && feed.next(&mut copy.reader).is_none());
    feed.promise(vec![digest(1), digest(2)]);
    feed.seal();
    assert_eq!(feed.next(&mut copy.reader), None, "no news");
    let mut resumed = feed.reader(Thinning::NONE, Some(feed.sequence)).hearing_promises();
    assert_eq!(feed.next(&mut resumed), Some(expected), "promises end with the stream");
    feed.promise(vec![]);
    feed.seal();
    assert_eq!(feed.next(&mut resumed), Some(Message::Promises(vec![])));
    assert!(matches!(feed.next(&mut deaf), Some(Message::Delta { .. })));
    assert_eq!(feed.next(&mut deaf), None, "an older follower gets none");
    feed.promise((0..PROMISES_MAX as u64 + 1).map(digest).collect());
    feed.seal();
    let told = feed.next(&mut resumed);
    assert!(matches!(&told, Some(Message::Promises(told)) if told.len() == PROMISES_MAX));
    let mut follower = Follower::resumed(KEYS_MAX, 0, Thinning::NONE);
    assert!(matches!(told.map(|told| follower.hear(told)), Some(Ok(Heard::Promises(_)))));
}

#[test]
fn what_comes_and_goes_between_two_batches_is_not_told() {
    let mut feed = feed_of(10);
    let mut reader = feed.reader(Thinning::NONE, Some(feed.sequence));
    feed.apply(&added(50..60));
    feed.apply(&removed(50..60));
    feed.apply(&removed(0..5));
    feed.apply(&added(0..5));
    feed.apply(&added(5..10));
    feed.apply(&removed(70..80));
    feed.seal();
    assert_eq!(feed.next(&mut reader), None, "nothing has changed");
    feed.apply(&removed(0..1));
    feed.apply(&added(0..1));
    feed.apply(&removed(0..1));
    feed.seal();
    let expected = Message::Delta { after: 1, sequence: 2, removed: vec![digest(0)], added: vec![] };
    assert_eq!(feed.next(&mut reader), Some(expected));
    assert_eq!(feed.next(&mut reader), None);
}

#[test]
fn messages_stay_below_their_limits_and_batches_are_made_without_being_asked_for() {
    let mut feed = feed_of(100_000);
    let mut reader = feed.reader(Thinning::NONE, None);
    let mut told = 0;
    while let Some(message) = feed.next(&mut reader) {
        if let Message::Chunk { digests, .. } = message {
            assert!(digests.len() <= CHUNK_DIGESTS_MAX);
            told += digests.len();
        }
    }
    assert_eq!(told, 100_000);
    let before = feed.sequence;
    feed.apply(&removed(0..3 * BATCH_CHANGES_MAX as u64));
    assert_eq!(feed.sequence, before + 3);
}

#[test]
fn who_missed_too_much_is_told_all_anew_and_who_did_not_goes_on() {
    let mut feed = feed_of(1000);
    let mut late = Copy::new(&feed, Thinning::NONE);
    late.catch_up(&feed);
    let known = late.follower.known();
    feed.apply(&added(1000..1100));
    feed.seal();
    late.reader = feed.reader(Thinning::NONE, known);
    late.follower = Follower::resumed(KEYS_MAX, known.expect("told"), Thinning::NONE);
    late.catch_up(&feed);
    assert_equal(&late, &(0..1100).map(digest).collect(), "a new stream goes on");
    assert_eq!(late.snapshots, 1);

    for round in 0..3 {
        feed.apply(&added(10_000..10_000 + CHANGES_MAX as u64));
        feed.apply(&removed(10_000..10_000 + CHANGES_MAX as u64));
        feed.seal();
        assert!(feed.batches.len() <= CHANGES_MAX / BATCH_CHANGES_MAX + 2, "bounded");
        late.catch_up(&feed);
        assert_eq!(late.snapshots, 2 + round);
    }
    assert_equal(&late, &(0..1100).map(digest).collect(), "sent again");

    let mut ahead = feed.reader(Thinning::NONE, Some(feed.sequence + 1));
    assert!(matches!(feed.next(&mut ahead), Some(Message::Begin { .. })), "of another life");
}

#[test]
fn malformed_inventories_are_refused_by_name() {
    let begin = |keys| Message::Begin { sequence: 5, keys, thinning: Thinning::NONE };
    let chunk = |digests: &[u64], last| Message::Chunk {
        sequence: 5,
        digests: digests.iter().copied().map(Digest).collect(),
        last,
    };
    let delta = |after, sequence, removed: &[u64], added: &[u64]| Message::Delta {
        after,
        sequence,
        removed: removed.iter().copied().map(Digest).collect(),
        added: added.iter().copied().map(Digest).collect(),
    };
    let hear = |messages: Vec<Message>| {
        let mut follower = Follower::new(1000);
        let results: Vec<_> = messages.into_iter().map(|message| follower.hear(message)).collect();
        results.into_iter().next_back().expect("one").expect_err("refused")
    };
    assert_eq!(hear(vec![chunk(&[1], false)]), Unheard::OutOfPlace);
    assert_eq!(hear(vec![delta(5, 6, &[], &[1])]), Unheard::OutOfPlace);
    assert_eq!(hear(vec![begin(5), chunk(&[1], true), chunk(&[2], true)]), Unheard::OutOfPlace);
    assert_eq!(hear(vec![begin(1001)]), Unheard::Memory { keys: 1001, max: 1000 });
    assert_eq!(hear(vec![begin(u64::MAX)]), Unheard::Memory { keys: u64::MAX, max: 1000 });
    let promises = |count| Message::Promises((0..count).map(digest).collect());
    assert_eq!(hear(vec![promises(0)]), Unheard::OutOfPlace);
    assert_eq!(hear(vec![begin(5), chunk(&[1], false), promises(1)]), Unheard::OutOfPlace);
    let most = PROMISES_MAX as u64;
    assert!(matches!(hear(vec![begin(5), chunk(&[1], true), promises(most + 1)]), Unheard::Long { .. }));
    assert_eq!(hear(vec![begin(5), chunk(&[2, 1], false)]), Unheard::Order);
    assert_eq!(hear(vec![begin(5), chunk(&[2], false), chunk(&[2], false)]), Unheard::Order);
    let gap = Unheard::Gap { known: 5, after: 6, sequence: 7 };
    assert_eq!(hear(vec![begin(5), chunk(&[2], true), delta(6, 7, &[], &[])]), gap);
    let early = Message::Chunk { sequence: 4, digests: vec![], last: false };
    assert_eq!(hear(vec![begin(5), early]), Unheard::Gap { known: 5, after: 4, sequence: 4 });
    let back = Unheard::Gap { known: 5, after: 5, sequence: 5 };
    assert_eq!(hear(vec![begin(5), chunk(&[2], true), delta(5, 5, &[], &[])]), back);
    assert_eq!(hear(vec![begin(5), chunk(&[2], false), delta(5, 6, &[1], &[])]), Unheard::Foreign);
    let long: Vec<u64> = (0..=CHUNK_DIGESTS_MAX as u64).collect();
    assert!(matches!(hear(vec![begin(5), chunk(&long, true)]), Unheard::Long { .. }));
    assert!(matches!(hear(vec![begin(5), delta(5, 6, &long, &[])]), Unheard::Long { .. }));
    // Far more than announced: the filter was made for fewer.
    let chunks = (0..20).map(|number| {
        let digests = (number * 1000..(number + 1) * 1000).map(|digest| digest << 40 | mix(digest) >> 32);
        chunk(&digests.collect::<Vec<_>>(), false)
    });
    let flood = std::iter::once(begin(5)).chain(chunks).collect();
    assert_eq!(hear(flood), Unheard::Overfull);

    let thinning = Thinning::new(3).expect("few");
    let mut follower = Follower::new(1000);
    let other = (0..).map(digest).find(|digest| !thinning.keeps(*digest)).expect("most");
    follower.hear(Message::Begin { sequence: 0, keys: 5, thinning }).expect("a beginning");
    let chunk = Message::Chunk { sequence: 0, digests: vec![other], last: true };
    assert_eq!(follower.hear(chunk).expect_err("not kept"), Unheard::Foreign);
}

#[test]
fn a_large_mesh_is_thinned_until_it_fits() {
    for (limit, peers) in [(1 << 30, 3), (1 << 30, 48), (256 << 20, 1000)] {
        let keys_max = keys_max(limit, peers);
        let mut follower = Follower::new(keys_max);
        let begin = |keys| Message::Begin { sequence: 0, keys, thinning: Thinning::NONE };
        assert!(matches!(follower.hear(begin(keys_max as u64 + 1)), Err(Unheard::Memory { .. })));
        follower.hear(begin(keys_max as u64)).expect("it fits");
        let last = Message::Chunk { sequence: 0, digests: vec![], last: true };
        let Heard::Snapshot(filter) = follower.hear(last).expect("a chunk") else { panic!("the last") };
        let bytes = filter.bytes() * peers;
        assert!(bytes <= limit && bytes > limit - limit / 50, "{bytes} of {limit}");
    }
    assert_eq!(keys_max(0, 1000), keys_max(1 << 20, 1000), "something of everyone");
}

/// Any interleaving of changes, batches and readers at any speed, some of them interrupted: in the end every
/// copy is the set.
#[test]
fn random_worlds_end_with_equal_sets() {
    for seed in 0..3 {
        let mut random = Random(seed);
        let mut feed = Feed::new(30_000);
        let (mut model, mut promised) = (HashSet::new(), Vec::new());
        feed.apply(&added(0..40_000));
        feed.seal();
        model.extend((0..40_000).map(digest));
        let mut copies: Vec<Copy> =
            (0..6).map(|number| Copy::new(&feed, Thinning::new(number % 3 * 2).expect("few"))).collect();
        for _ in 0..400 {
            let numbers = 60_000;
            match random.next() % 16 {
                0..5 => {
                    let change = |number: u64| {
                        let digest = digest(number % numbers);
                        let add = number.is_multiple_of(2);
                        if add {
                            model.insert(digest)
                        } else {
                            model.remove(&digest)
                        };
                        if add { Change::Added(digest) } else { Change::Removed(digest) }
                    };
                    let count = random.next() % 2000;
                    let changes: Vec<Change> = (0..count).map(|_| random.next()).map(change).collect();
                    feed.apply(&changes);
                }
                5 => feed.seal(),
                6 => {
                    promised = (0..random.next() % 100).map(digest).collect();
                    feed.promise(promised.clone());
                }
                7 => {
                    let copy = &mut copies[random.next() as usize % 6];
                    let known = copy.follower.known();
                    copy.reader = feed.reader(copy.reader.thinning, known).hearing_promises();
                    copy.promises = None;
                    copy.follower = match known {
                        Some(known) => Follower::resumed(KEYS_MAX, known, copy.reader.thinning),
                        None => Follower::new(KEYS_MAX),
                    };
                }
                _ => drop(copies[random.next() as usize % 6].step(&feed)),
            }
        }
        feed.seal();
        assert_eq!(feed.len(), model.len(), "seed {seed}");
        for copy in &mut copies {
            copy.catch_up(&feed);
            assert_equal(copy, &model, &format!("seed {seed}, {:?}", copy.reader.thinning));
            assert_eq!(copy.promises.as_ref(), Some(&promised), "seed {seed}");
        }
    }
}

#[test]
fn batches_that_a_follower_has_not_seen_are_told_as_one() {
    let mut feed = feed_of(100);
    let mut copy = Copy::new(&feed, Thinning::NONE);
    copy.catch_up(&feed);
    let known = feed.sequence;
    for changes in [added(200..210), removed(200..205), added(200..202), removed(0..5), added(0..5)] {
        assert!(feed.is_told(&copy.reader) == (feed.sequence == known));
        feed.apply(&changes);
        feed.seal();
    }
    let expected: HashSet<Digest> = (200..202).chain(205..210).map(digest).collect();
    match feed.next(&mut copy.reader.clone()) {
        Some(Message::Delta { after, sequence, removed, added }) => {
            assert_eq!((after, sequence, removed), (known, known + 5, vec![]));
            assert_eq!(added.into_iter().collect::<HashSet<_>>(), expected);
        }
        other => panic!("{other:?}"),
    }
    copy.catch_up(&feed);
    assert!(feed.is_told(&copy.reader));
    let model = (0..100).chain(200..202).chain(205..210).map(digest).collect();
    assert_equal(&copy, &model, "the sum of the batches");
    // Batches are merged as far as a message has room: those that undo each other send nothing, however many
    // there are.
    let most = BATCH_CHANGES_MAX as u64;
    for changes in [added(1000..1000 + most), removed(1000..1000 + most), added(1000..1001)] {
        feed.apply(&changes);
        feed.seal();
    }
    let told = std::iter::from_fn(|| feed.next(&mut copy.reader)).map(|message| match message {
        Message::Delta { removed, added, .. } => removed.len() + added.len(),
        other => panic!("{other:?}"),
    });
    assert_eq!(told.collect::<Vec<_>>(), [BATCH_CHANGES_MAX, BATCH_CHANGES_MAX, 1]);
}
