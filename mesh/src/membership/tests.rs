use std::num::NonZeroU64;

use super::*;
use crate::random::Random;

const GONE_MS: u64 = 1000;

fn identity(node: &str, boot: u64) -> Identity {
    let data = DataAddresses { tcp: "10.0.0.1:2".parse().unwrap(), rdma: None };
    Identity { node: NodeId::new(node).unwrap(), boot: BootId(NonZeroU64::new(boot).unwrap()), data }
}

fn registration(node: &str, boot: u64, created: i64) -> Registration {
    Registration { identity: identity(node, boot), control: "10.0.0.1:1".parse().unwrap(), created }
}

fn table() -> Membership {
    let own = identity("self", 1);
    Membership::new((own.node, own.boot), GONE_MS)
}

/// What was told, and who is followed, in short words.
fn words(steps: impl IntoIterator<Item = Step>) -> Vec<String> {
    let word = |step| match step {
        Step::Tell(News::Joined { number, peer, .. }) => {
            format!("{} joins as {} in {}", peer.node, number.0, peer.boot.unwrap().0)
        }
        Step::Tell(News::Left { number, why }) => format!("{} leaves: {why:?}", number.0),
        Step::Tell(News::Stale { number }) => format!("{} is stale", number.0),
        Step::Tell(other) => format!("{other:?}"),
        Step::Follow(seat, address) => format!("follow {} at {address}", seat.0),
        Step::Unfollow(seat) => format!("unfollow {}", seat.0),
    };
    steps.into_iter().map(word).collect()
}

#[test]
fn a_listed_node_is_a_member_when_it_has_said_who_it_is_and_until_long_silence() {
    let mut table = table();
    assert_eq!(
        words(table.listed(&["a:1".into(), "b:1".into(), "a:1".into()])),
        ["follow 1 at a:1", "follow 2 at b:1"]
    );
    let (a, b) = (Seat(1), Seat(2));
    assert!(table.down(0, a).is_none() && table.number(a).is_none());
    assert_eq!(words(table.hello(a, &identity("a", 1)).unwrap()), ["a joins as 1 in 1"]);
    assert_eq!((table.number(a), table.seat(PeerNumber(1))), (Some(PeerNumber(1)), Some(a)));
    assert!(table.knows("self", 1) && table.knows("a", 1) && !table.knows("a", 2) && !table.knows("b", 1));
    // A break, and the same life again.
    assert_eq!(words(table.down(100, a)), ["1 is stale"]);
    assert!(!table.knows("a", 1));
    assert!(table.down(200, a).is_none() && table.tick(100 + GONE_MS - 1).is_empty());
    assert!(table.hello(a, &identity("a", 1)).unwrap().is_empty());
    assert!(table.tick(u64::MAX).is_empty());
    // Another life.
    assert_eq!(
        words(table.hello(a, &identity("a", 2)).unwrap()),
        ["1 leaves: Restarted", "a joins as 2 in 2"]
    );
    // Silence counts from its begin.
    assert_eq!(words(table.down(5000, a)), ["2 is stale"]);
    table.down(5900, a);
    assert_eq!(words(table.tick(5000 + GONE_MS)), ["2 leaves: Silent"]);
    assert!(table.tick(u64::MAX).is_empty() && table.down(6000, a).is_none());
    assert_eq!(words(table.hello(a, &identity("a", 2)).unwrap()), ["a joins as 3 in 2"]);
    // The node itself is not followed any more.
    assert_eq!(words(table.hello(b, &identity("self", 1)).unwrap()), ["unfollow 2"]);
}

#[test]
fn a_name_has_one_listed_member() {
    let mut table = table();
    table.listed(&["a:1".into(), "b:1".into()]);
    let (a, b) = (Seat(1), Seat(2));
    let refused = |why: Result<Vec<Step>, String>| why.unwrap_err();
    assert!(refused(table.hello(a, &identity("self", 9))).contains("--node-id"));
    table.hello(a, &identity("x", 1)).unwrap();
    assert!(refused(table.hello(b, &identity("x", 1))).contains("list it once"));
    assert!(refused(table.hello(b, &identity("x", 2))).contains("--node-id"));
    // Where the first is silent, it has moved.
    table.down(0, a);
    assert_eq!(
        words(table.hello(b, &identity("x", 1)).unwrap()),
        ["1 leaves: Restarted", "x joins as 2 in 1"]
    );
    assert!(refused(table.hello(a, &identity("x", 1))).contains("list it once"));
    assert_eq!(words(table.hello(a, &identity("y", 1)).unwrap()), ["y joins as 3 in 1"]);
}

#[test]
fn a_registration_is_a_member_until_it_ends() {
    let mut table = table();
    let a = NodeId::new("a").unwrap();
    assert!(table.put(registration("self", 7, 3)).is_empty());
    assert_eq!(words(table.put(registration("a", 1, 5))), ["a joins as 1 in 1", "follow 1 at 10.0.0.1:1"]);
    assert!(table.put(registration("a", 1, 5)).is_empty(), "written again");
    // Who answers there must be it.
    let seat = Seat(1);
    assert!(table.hello(seat, &identity("a", 2)).unwrap_err().contains("another life"));
    assert!(table.hello(seat, &identity("b", 1)).unwrap_err().contains("b answers there"));
    assert!(table.hello(seat, &identity("a", 1)).unwrap().is_empty());
    // Silence alone fences nobody.
    assert_eq!(words(table.down(0, seat)), ["1 is stale"]);
    assert!(table.tick(u64::MAX).is_empty());
    // What is older than the known is of no account.
    assert!(table.put(registration("a", 9, 4)).is_empty() && table.delete(&a, 5).is_empty());
    assert_eq!(words(table.delete(&a, 8)), ["1 leaves: Unregistered", "unfollow 1"]);
    assert!(table.delete(&a, 9).is_empty());
    assert_eq!(words(table.put(registration("a", 1, 10))), ["a joins as 2 in 1", "follow 2 at 10.0.0.1:1"]);
    let again = ["2 leaves: Restarted", "unfollow 2", "a joins as 3 in 2", "follow 3 at 10.0.0.1:1"];
    assert_eq!(words(table.put(registration("a", 2, 12))), again);
    assert!(table.hello(Seat(2), &identity("a", 1)).is_ok_and(|steps| words(steps) == ["unfollow 2"]));
    // A list says who is there, and so who is not.
    let list = vec![registration("b", 1, 14), registration("self", 1, 2)];
    let steps = words(table.registered(list.clone()));
    assert_eq!(
        steps,
        ["3 leaves: Unregistered", "unfollow 3", "b joins as 4 in 1", "follow 4 at 10.0.0.1:1"]
    );
    assert!(table.registered(list).is_empty());
}

#[test]
fn a_mesh_has_a_limit() {
    let mut table = table();
    for number in 0..MEMBERS_MAX as i64 {
        assert_eq!(table.put(registration(&format!("n{number}"), 1, number)).len(), 2);
    }
    let steps = words(table.put(registration("more", 1, 9999)));
    assert!(steps.len() == 1 && steps[0].contains("at most 1024"), "{steps:?}");
    assert_eq!(table.delete(&NodeId::new("n7").unwrap(), 10_000).len(), 2);
    assert_eq!(table.put(registration("more", 1, 9999)).len(), 2);
}

/// What the caller and the tasks believe, from the steps alone.
#[derive(Default)]
struct Believed {
    members: BTreeMap<PeerNumber, NodeId>,
    followed: HashSet<Seat>,
    last: u32,
}

impl Believed {
    fn believe(&mut self, steps: impl IntoIterator<Item = Step>) {
        for step in steps {
            match step {
                Step::Tell(News::Joined { number, peer, .. }) => {
                    assert!(number.0 > self.last, "a number is used once");
                    self.last = number.0;
                    assert!(self.members.values().all(|node| *node != peer.node), "one member for a name");
                    self.members.insert(number, peer.node);
                }
                Step::Tell(News::Left { number, .. }) => assert!(self.members.remove(&number).is_some()),
                Step::Tell(News::Stale { number }) => assert!(self.members.contains_key(&number)),
                Step::Tell(_) => {}
                Step::Follow(seat, _) => assert!(self.followed.insert(seat), "a seat is used once"),
                Step::Unfollow(seat) => drop(self.followed.remove(&seat)),
            }
        }
    }

    fn check(&self, table: &Membership) {
        let members: BTreeMap<_, _> =
            table.seats().map(|(_, member)| (member.number, member.identity.node.clone())).collect();
        assert_eq!(members, self.members);
        assert_eq!(table.places.keys().copied().collect::<HashSet<_>>(), self.followed);
        assert!(!members.values().any(|node| node.as_str() == "self"), "itself is no member");
    }
}

#[test]
fn whatever_happens_the_promises_hold() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let (mut table, mut believed) = (table(), Believed::default());
        let listed = seed % 2 == 0;
        if listed {
            believed.believe(table.listed(&["a:1", "b:1", "c:1", "d:1"].map(String::from)));
        }
        let mut now_ms = 0;
        for revision in 1..200 {
            let names = ["a", "b", "c", "d", "self"];
            let mut draw = |limit: u64| random.next() % limit;
            let (name, boot) = (names[draw(5) as usize], 1 + draw(3));
            let seat = Seat(1 + draw(u64::from(table.seats) + 1) as u32);
            now_ms += draw(GONE_MS / 2);
            match draw(if listed { 3 } else { 6 }) {
                0 => believed.believe(table.hello(seat, &identity(name, boot)).unwrap_or_default()),
                1 => believed.believe(table.down(now_ms, seat)),
                2 => believed.believe(table.tick(now_ms)),
                3 => believed.believe(table.put(registration(name, boot, revision - draw(5) as i64))),
                4 => believed.believe(table.delete(&NodeId::new(name).unwrap(), revision - draw(5) as i64)),
                _ => {
                    let mut all: Vec<_> =
                        names.iter().map(|name| registration(name, 1 + draw(3), revision)).collect();
                    all.retain(|_| draw(2) == 0);
                    believed.believe(table.registered(all));
                }
            }
            believed.check(&table);
        }
    }
}
