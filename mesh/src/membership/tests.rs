use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::num::NonZeroU64;

use super::*;
use shm_protocol::random::Random;

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

/// The steps in short words.
fn words(steps: impl IntoIterator<Item = Step>) -> Vec<String> {
    let word = |step| match step {
        Step::Tell(News::Joined { number, peer, .. }) => {
            format!("{} joins as {} in {}", peer.node, number.0, peer.boot.unwrap().0)
        }
        Step::Tell(News::Left { number, why }) => format!("{} leaves: {why:?}", number.0),
        Step::Tell(News::Stale { number }) => format!("{} is stale", number.0),
        Step::Tell(other) => format!("{other:?}"),
        Step::Follow(endpoint, address) => format!("follow {} at {address}", endpoint.0),
        Step::Unfollow(endpoint) => format!("unfollow {}", endpoint.0),
        Step::Retry => "Retry".into(),
    };
    steps.into_iter().map(word).collect()
}

fn address(host: u8) -> SocketAddr {
    (Ipv4Addr::new(10, 0, 0, host), 1).into()
}

fn addresses(hosts: &[u8]) -> BTreeSet<SocketAddr> {
    hosts.iter().map(|host| address(*host)).collect()
}

/// Lists these addresses, each under its own name.
fn list(table: &mut Membership, hosts: std::ops::RangeInclusive<u8>) -> Vec<String> {
    hosts.flat_map(|host| words(table.resolved(0, &address(host).to_string(), addresses(&[host])))).collect()
}

fn unreached() -> Failure {
    Failure::Unreached("connection refused".into())
}

/// Brings up a stream of an endpoint with this node. Returns the steps in words.
fn hello(table: &mut Membership, now_ms: u64, endpoint: u32, node: &str, boot: u64) -> Vec<String> {
    words(table.hello(now_ms, Endpoint(endpoint), &identity(node, boot)).unwrap())
}

fn refused(table: &mut Membership, endpoint: u32, node: &str, boot: u64) -> Failure {
    let why = table.hello(0, Endpoint(endpoint), &identity(node, boot)).unwrap_err();
    assert!(words(table.down(0, Endpoint(endpoint), &why)).is_empty(), "it has no member");
    why
}

#[test]
fn a_listed_node_is_a_member_when_it_has_said_who_it_is_and_until_long_silence() {
    let mut table = table();
    assert_eq!(list(&mut table, 1..=2), ["follow 1 at 10.0.0.1:1", "follow 2 at 10.0.0.2:1"]);
    assert!(list(&mut table, 1..=1).is_empty(), "listed once");
    let a = Endpoint(1);
    assert!(table.down(0, a, &unreached()).is_empty() && table.number(a).is_none());
    assert_eq!(hello(&mut table, 0, 1, "a", 1), ["a joins as 1 in 1"]);
    assert_eq!((table.number(a), table.endpoint(PeerNumber(1))), (Some(PeerNumber(1)), Some(a)));
    assert!(table.knows("self", 1) && table.knows("a", 1) && !table.knows("a", 2) && !table.knows("b", 1));
    assert_eq!(hello(&mut table, 0, 2, "b", 1), ["b joins as 2 in 1"]);
    // A break, and the same life again.
    assert_eq!(words(table.down(100, a, &unreached())), ["1 is stale"]);
    assert!(!table.knows("a", 1));
    assert!(table.down(200, a, &unreached()).is_empty() && table.tick(100 + GONE_MS - 1).is_empty());
    assert!(hello(&mut table, 0, 1, "a", 1).is_empty());
    assert!(table.tick(u64::MAX).is_empty());
    // Another life.
    assert_eq!(hello(&mut table, 0, 1, "a", 2), ["1 leaves: Restarted", "a joins as 3 in 2"]);
    // Silence counts from its begin.
    assert_eq!(words(table.down(5000, a, &unreached())), ["3 is stale"]);
    table.down(5900, a, &unreached());
    assert_eq!(words(table.tick(5000 + GONE_MS)), ["3 leaves: Silent"]);
    assert!(table.down(6000, a, &unreached()).is_empty());
    assert_eq!(hello(&mut table, 6000, 1, "a", 2), ["a joins as 4 in 2"]);
}

#[test]
fn every_address_of_a_name_is_an_endpoint_for_as_long_as_it_is_listed_or_has_a_member() {
    let mut table = table();
    let resolved =
        |table: &mut Membership, hosts: &[u8]| words(table.resolved(0, "pods:1", addresses(hosts)));
    assert_eq!(resolved(&mut table, &[1, 2, 3]).len(), 3);
    assert!(resolved(&mut table, &[1, 2, 3]).is_empty());
    assert_eq!(hello(&mut table, 0, 1, "a", 1), ["a joins as 1 in 1"]);
    assert_eq!(hello(&mut table, 0, 2, "b", 1), ["b joins as 2 in 1"]);
    assert_eq!(table.empty(), 1);
    // An endpoint without a member goes; one with a member stays until the member is silent for long.
    assert_eq!(resolved(&mut table, &[1, 4]), ["unfollow 3", "follow 4 at 10.0.0.4:1"]);
    assert_eq!(words(table.down(0, Endpoint(2), &unreached())), ["2 is stale"]);
    assert!(hello(&mut table, 0, 2, "b", 1).is_empty(), "its stream may break and come back");
    table.down(0, Endpoint(2), &unreached());
    assert_eq!(words(table.tick(GONE_MS))[..2], ["2 leaves: Silent", "unfollow 2"]);
    // Or until the member answers at another address.
    table.down(0, Endpoint(1), &unreached());
    assert_eq!(resolved(&mut table, &[4]), Vec::<String>::new());
    let moved = ["1 leaves: Restarted", "unfollow 1", "a joins as 3 in 1"];
    assert_eq!(hello(&mut table, 0, 4, "a", 1), moved);
    // The address is no longer listed, and another node there does not become a member.
    resolved(&mut table, &[5]);
    assert_eq!(hello(&mut table, 0, 4, "c", 1), ["3 leaves: Restarted", "unfollow 4"]);
    // An address of two names stays while one of them has it.
    table.resolved(0, "others:1", addresses(&[5]));
    assert_eq!(resolved(&mut table, &[6]), ["follow 6 at 10.0.0.6:1"]);
    assert_eq!(words(table.resolved(0, "others:1", addresses(&[]))), ["unfollow 5"]);
}

#[test]
fn a_node_itself_is_tried_again_when_the_addresses_of_its_name_change() {
    let mut table = table();
    table.resolved(0, "pods:1", addresses(&[1, 2]));
    assert_eq!(hello(&mut table, 0, 1, "self", 1), ["unfollow 1"]);
    assert_eq!((table.empty(), table.sharing()), (1, 1), "itself is not missing");
    assert!(table.resolved(0, "pods:1", addresses(&[1, 2])).is_empty());
    let again = words(table.resolved(0, "pods:1", addresses(&[1, 3])));
    let own = ["unfollow 1", "follow 1 at 10.0.0.1:1"];
    assert_eq!(again, [own[0], own[1], "unfollow 2", "follow 3 at 10.0.0.3:1"]);
    assert_eq!(table.empty(), 1, "as long as nothing else is heard there");
    assert_eq!(hello(&mut table, 0, 1, "self", 1), ["unfollow 1"]);
    assert_eq!(words(table.resolved(0, "pods:1", addresses(&[1]))), [own[0], own[1], "unfollow 3"]);
    assert!(table.down(0, Endpoint(1), &unreached()).is_empty());
    assert_eq!(table.empty(), 1);
    assert_eq!(words(table.resolved(0, "pods:1", addresses(&[3])))[0], "unfollow 1");
}

#[test]
fn a_name_has_one_listed_member_and_its_other_addresses_are_spare() {
    let mut table = table();
    list(&mut table, 1..=3);
    assert!(refused(&mut table, 1, "self", 9).to_string().contains("--node-id"));
    hello(&mut table, 0, 1, "x", 1);
    assert_eq!(table.sharing(), 3);
    assert_eq!(refused(&mut table, 2, "x", 1), Failure::Elsewhere(identity("x", 1).node));
    assert_eq!((table.empty(), table.sharing()), (1, 2), "nobody is missing there, and nobody gets a share");
    assert!(refused(&mut table, 2, "x", 2).to_string().contains("10.0.0.2:1: give each its own --node-id"));
    assert_eq!((table.empty(), table.sharing()), (2, 3));
    // The node has moved if the stream at its first address is down.
    assert_eq!(words(table.down(0, Endpoint(1), &unreached())), ["1 is stale", "Retry"]);
    assert_eq!(hello(&mut table, 0, 2, "x", 2), ["1 leaves: Restarted", "x joins as 2 in 2"]);
    assert_eq!(refused(&mut table, 1, "x", 2), Failure::Elsewhere(identity("x", 1).node));
    assert_eq!(hello(&mut table, 0, 1, "y", 1), ["y joins as 3 in 1"]);
    assert_eq!(words(table.down(0, Endpoint(2), &unreached())), ["2 is stale"], "nobody waits for it");
}

#[test]
fn an_endpoint_that_has_no_member_for_long_is_told_of_once() {
    let mut table = table();
    table.resolved(0, "pods:1", addresses(&[1, 2, 3, 4]));
    hello(&mut table, 0, 1, "self", 1);
    hello(&mut table, 0, 2, "a", 1);
    refused(&mut table, 3, "a", 1);
    table.down(0, Endpoint(4), &unreached());
    assert!(table.tick(GONE_MS - 1).is_empty());
    assert_eq!(table.sharing(), 2);
    let told = words(table.tick(GONE_MS));
    let text = "10.0.0.4:1 (--peer pods:1) has had no member for 1 s: connection refused. Check that";
    assert!(told.len() == 1 && told[0].contains(text) && told[0].contains("--mesh-name"), "{told:?}");
    assert_eq!((table.tick(GONE_MS * 9).len(), table.empty(), table.sharing()), (0, 1, 1));
    // An address mended and lost again is reported again.
    assert_eq!(hello(&mut table, 9000, 4, "b", 1), ["b joins as 2 in 1"]);
    assert_eq!((table.empty(), table.sharing()), (0, 2));
    table.down(10_000, Endpoint(4), &unreached());
    assert_eq!(words(table.tick(10_000 + GONE_MS)), ["2 leaves: Silent"]);
    assert_eq!(table.tick(10_000 + 2 * GONE_MS - 1).len(), 0);
    assert_eq!(table.tick(10_000 + 2 * GONE_MS).len(), 1);
}

#[test]
fn endpoints_have_a_limit_that_is_told_of() {
    let all = |from: u32, count: usize| -> BTreeSet<SocketAddr> {
        (from..).take(count).map(|host| (Ipv4Addr::from(10 << 24 | host), 1).into()).collect()
    };
    let mut table = table();
    let steps = words(table.resolved(0, "pods:1", all(0, ENDPOINTS_MAX + 3)));
    assert_eq!(steps.len(), ENDPOINTS_MAX + 1);
    assert!(steps.last().unwrap().contains("3 addresses are not followed, of 'pods:1'"), "{steps:?}");
    assert!(table.resolved(0, "pods:1", all(0, ENDPOINTS_MAX + 3)).is_empty());
    // There is room as soon as others go.
    let steps = words(table.resolved(0, "pods:1", all(3, ENDPOINTS_MAX)));
    assert_eq!(steps.len(), 6, "{steps:?}");
    // Members have a lower limit.
    for number in 0..MEMBERS_MAX as u32 {
        assert_eq!(hello(&mut table, 0, 4 + number, &format!("n{number}"), 1).len(), 1);
    }
    let more = 4 + MEMBERS_MAX as u32;
    assert!(refused(&mut table, more, "more", 1).to_string().contains("at most 1024 nodes"));
    assert_eq!(hello(&mut table, 0, 4, "n0", 2).len(), 2, "a member may live again");
}

#[test]
fn a_registration_is_a_member_until_it_ends() {
    let mut table = table();
    let a = NodeId::new("a").unwrap();
    assert!(table.put(registration("self", 7, 3)).is_empty());
    assert_eq!(words(table.put(registration("a", 1, 5))), ["a joins as 1 in 1", "follow 1 at 10.0.0.1:1"]);
    assert!(table.put(registration("a", 1, 5)).is_empty(), "written again");
    // The node at that address must be the registered one.
    let endpoint = Endpoint(1);
    let wrong = |why: Result<Vec<Step>, Failure>| why.unwrap_err().to_string();
    assert!(wrong(table.hello(0, endpoint, &identity("a", 2))).contains("after a restart"));
    assert!(wrong(table.hello(0, endpoint, &identity("b", 1))).contains("b answers there"));
    assert!(table.hello(0, endpoint, &identity("a", 1)).unwrap().is_empty());
    // Silence alone removes no registered member.
    assert_eq!(words(table.down(0, endpoint, &unreached())), ["1 is stale"]);
    assert!(table.tick(u64::MAX).is_empty());
    // An older revision than the known is ignored.
    assert!(table.put(registration("a", 9, 4)).is_empty() && table.delete(&a, 5).is_empty());
    assert_eq!(words(table.delete(&a, 8)), ["1 leaves: Unregistered", "unfollow 1"]);
    assert!(table.delete(&a, 9).is_empty());
    assert_eq!(words(table.put(registration("a", 1, 10))), ["a joins as 2 in 1", "follow 2 at 10.0.0.1:1"]);
    let again = ["2 leaves: Restarted", "unfollow 2", "a joins as 3 in 2", "follow 3 at 10.0.0.1:1"];
    assert_eq!(words(table.put(registration("a", 2, 12))), again);
    assert_eq!(hello(&mut table, 0, 2, "a", 1), ["unfollow 2"]);
    // A list removes the members it does not name.
    let list = vec![registration("b", 1, 14), registration("self", 1, 2)];
    let steps = words(table.registered(list.clone()));
    assert_eq!(
        steps,
        ["3 leaves: Unregistered", "unfollow 3", "b joins as 4 in 1", "follow 4 at 10.0.0.1:1"]
    );
    assert!(table.registered(list).is_empty());
}

#[test]
fn a_list_is_the_truth_where_etcd_was_restored_from_a_backup() {
    let mut table = table();
    let list = ["a", "b"].map(|node| registration(node, 1, 100));
    assert_eq!(table.registered(list.to_vec()).len(), 4);
    let restored = table.registered(vec![registration("a", 1, 3), registration("b", 2, 4)]);
    assert_eq!(
        words(restored),
        ["2 leaves: Restarted", "unfollow 2", "b joins as 3 in 2", "follow 3 at 10.0.0.1:1"]
    );
    let a = table.delete(&NodeId::new("a").unwrap(), 5);
    assert_eq!(words(a), ["1 leaves: Unregistered", "unfollow 1"]);
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

/// The state of the caller and the tasks, from the steps alone.
#[derive(Default)]
struct Believed {
    members: BTreeMap<PeerNumber, NodeId>,
    followed: HashSet<Endpoint>,
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
                Step::Tell(_) | Step::Retry => {}
                Step::Follow(endpoint, _) => {
                    assert!(self.followed.insert(endpoint), "it is not followed yet")
                }
                Step::Unfollow(endpoint) => drop(self.followed.remove(&endpoint)),
            }
        }
    }

    fn check(&self, table: &Membership) {
        let members: BTreeMap<_, _> =
            table.members().map(|(_, member)| (member.number, member.identity.node.clone())).collect();
        assert_eq!(members, self.members);
        assert!(self.followed.iter().all(|endpoint| table.places.contains_key(endpoint)));
        let followed = |(endpoint, place): (_, &Place)| place.is_own() || self.followed.contains(endpoint);
        assert!(table.places.iter().all(followed));
        let listed: Vec<SocketAddr> = table.listed().map(|(_, address, _)| address).collect();
        assert!(table.names.values().flatten().all(|address| listed.contains(address)));
        let alone = |place: &Place| place.address().is_some_and(|address| !table.lists(address));
        assert!(table.places.values().all(|place| place.member().is_some() || !alone(place)));
        assert!(!members.values().any(|node| node.as_str() == "self"), "itself is no member");
    }
}

#[test]
fn whatever_happens_the_promises_hold() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let (mut table, mut believed) = (table(), Believed::default());
        let listed = seed % 2 == 0;
        let mut now_ms = 0;
        for revision in 1..200 {
            let names = ["a", "b", "c", "d", "self"];
            let mut draw = |limit: u64| random.next() % limit;
            let (name, boot) = (names[draw(5) as usize], 1 + draw(3));
            let endpoint = Endpoint(1 + draw(u64::from(table.endpoints) + 1) as u32);
            now_ms += draw(GONE_MS / 2);
            let followed = believed.followed.contains(&endpoint);
            match if listed { draw(4) } else { [0, 1, 2, 4, 5, 6][draw(6) as usize] } {
                0 | 1 if !followed => {}
                0 => match table.hello(now_ms, endpoint, &identity(name, boot)) {
                    Ok(steps) => believed.believe(steps),
                    Err(why) => believed.believe(table.down(now_ms, endpoint, &why)),
                },
                1 => believed.believe(table.down(now_ms, endpoint, &unreached())),
                2 => believed.believe(table.tick(now_ms)),
                3 => {
                    let hosts: Vec<u8> = (1..=6).filter(|_| draw(3) > 0).collect();
                    let name = ["pods:1", "others:1"][draw(2) as usize];
                    believed.believe(table.resolved(now_ms, name, addresses(&hosts)));
                }
                4 => believed.believe(table.put(registration(name, boot, revision - draw(5) as i64))),
                5 => believed.believe(table.delete(&NodeId::new(name).unwrap(), revision - draw(5) as i64)),
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
