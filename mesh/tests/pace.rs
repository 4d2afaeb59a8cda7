//! The pace of announcements, in a mesh with the pace of a large one.

mod rig;

use std::time::Duration;

use mesh::control::Limits;
use rig::crew::{Crew, Plan, added, address, patient};
use rig::now;

/// Two followers rest for twice this time.
const TURN: Duration = Duration::from_millis(400);
const REST: Duration = TURN.saturating_mul(2);

/// A node with a hundred blocks, and two followers that know them.
fn mesh() -> (Crew, [Crew; 2]) {
    let limits = Limits { turn: TURN, ..patient() };
    let at = address();
    let one = Plan { limits, ..Plan::listing("one", at, &[]) }.start();
    one.publish(added(0..100));
    // Each lists two addresses, so it expects its peers to have as many followers.
    let follower = |name| Plan { limits, ..Plan::listing(name, address(), &[at, address()]) }.start();
    let two = [follower("two"), follower("three")];
    for follower in &two {
        follower.keeps(follower.joined("one", 1), 0..100, 900_000..901_000);
    }
    (one, two)
}

/// Publishes blocks one at a time, from number `from` on and for longer than a rest. Returns their number.
fn publish_for(one: &Crew, from: u64, time: Duration) -> u64 {
    let began = now();
    let mut next = from;
    while began.elapsed() < time {
        one.publish(added(next..next + 1));
        next += 1;
        std::thread::sleep(Duration::from_millis(10));
    }
    next - from
}

fn batches(of: &Crew) -> u32 {
    of.seen(|seen| seen.members.values().map(|member| member.batches).sum())
}

#[test]
fn the_more_follow_the_longer_each_rests_between_two_batches() {
    let (one, followers) = mesh();
    assert_eq!(one.control().pace(), REST);
    let (began, before) = (now(), followers.each_ref().map(batches));
    let count = publish_for(&one, 1000, REST * 3 / 2);
    for (follower, before) in followers.iter().zip(before) {
        follower.keeps(follower.joined("one", 1), 1000..1000 + count, 900_000..901_000);
        // The first batch comes at once, and one for each rest since.
        let most = 1 + began.elapsed().div_duration_f64(REST) as u32;
        let batches = batches(follower) - before;
        assert!(
            (1..=most).contains(&batches),
            "{batches} batches, where {most} are the most, of {count} changes"
        );
    }
}

#[test]
fn who_waits_is_told_between_the_rests_of_the_others_and_they_are_not() {
    let (one, [waits, other]) = mesh();
    let number = waits.joined("one", 1);
    // Both rest from here on.
    one.publish(added(500..501));
    for follower in [&waits, &other] {
        follower.keeps(follower.joined("one", 1), 500..501, 900_000..901_000);
    }
    let (mut sooner, mut next) = (0, 1000);
    for _ in 0..5 {
        waits.control().wait();
        one.publish(added(next..next + 1));
        waits.keeps(number, next..next + 1, 900_000..901_000);
        next += 1;
        let knows = |seen: &rig::crew::Seen| {
            let filter = seen.members.values().find_map(|member| member.filter.as_ref());
            filter.is_some_and(|filter| filter.contains(rig::crew::digest(next - 1)))
        };
        sooner += u32::from(!other.seen(knows));
    }
    assert!(sooner > 0, "no block came to the waiting follower before the other");
    assert!(batches(&waits) > batches(&other), "{} and {}", batches(&waits), batches(&other));
    other.keeps(other.joined("one", 1), 1000..next, 900_000..901_000);
}
