//! A mesh of listed nodes: who joins, what each learns of the others, and the harm of a bad peer or network.

mod rig;

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mesh::control::wire::namespaces::{NodeNamespace, StatedFacts};
use mesh::control::{BlocksListed, Control, ControlLimits, Counted, Listing, MemberEvent, Members, Parting};
use mesh::digest::Digest;
use mesh::listed::{BlocksAsk, ListedBlock};
use mesh::refusals::Reason;
use mesh::tls::Security;
use mesh::transport::PeerNumber;
use rig::certificates::{Authority, Folder, NAME};
use rig::crew::{Crew, Plan, Seen, added, address, digest, patient, removed};
use rig::proxy::{Proxy, Trouble, Troubles};
use rig::{WATCHDOG, now};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::namespace::{self, Facts};

/// Namespaces of a node, and how often they were counted.
#[derive(Debug)]
struct Counting {
    all: Vec<NodeNamespace>,
    counts: AtomicU64,
}

/// A node with a list of two blocks for one namespace.
#[derive(Debug)]
struct Listed(NamespaceDigest);

impl Listing for Listed {
    fn list_namespaces(&self) -> Counted {
        Box::pin(std::future::ready(None))
    }

    fn list_blocks(&self, asker: Option<PeerNumber>, asked: BlocksAsk) -> BlocksListed {
        let blocks = if asker.is_some() && asked.namespace == self.0 { two_blocks() } else { Vec::new() };
        Box::pin(std::future::ready(Some(blocks)))
    }
}

fn two_blocks() -> Vec<ListedBlock> {
    let block = |number, parent| {
        let hash = BlockHash::from_words([number, 0, 0, 0]);
        ListedBlock { hash, parent, uses: 0.5 }
    };
    vec![block(1, None), block(2, Some(0))]
}

impl Listing for Counting {
    fn list_namespaces(&self) -> Counted {
        self.counts.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::ready(Some(self.all.clone())))
    }

    fn list_blocks(&self, _: Option<PeerNumber>, _: BlocksAsk) -> BlocksListed {
        Box::pin(std::future::ready(None))
    }
}

/// A namespace of so many blocks, with facts of some kilobytes.
fn namespace_of(memory_blocks: u64) -> NodeNamespace {
    let facts =
        [("model".to_owned(), format!("m{memory_blocks}")), ("page_form".to_owned(), "x".repeat(4000))];
    let facts = Facts::from(facts);
    let digest = namespace::digest_facts(&facts);
    let stated = Some(StatedFacts { facts: Arc::new(facts), block_bytes: 1 << 20, shards: 2 });
    NodeNamespace { digest, stated, memory_blocks, disk_blocks: 1 }
}

/// Two nodes, each listing both.
fn pair() -> (Crew, Crew) {
    let all = [address(), address()];
    (Plan::listing("one", all[0], &all).start(), Plan::listing("two", all[1], &all).start())
}

#[test]
fn nodes_that_list_each_other_know_what_each_keeps_whoever_is_first() {
    let all = [address(), address(), address()];
    let one = Plan::listing("one", all[0], &all).start();
    one.publish(added(0..1000));
    let two = Plan::listing("two", all[1], &all).start();
    two.publish(added(5000..5010));
    let three = Plan::listing("three", all[2], &all).start();
    for (from, to, keys) in [(&one, &two, 0..1000), (&two, &one, 5000..5010), (&one, &three, 0..1000)] {
        let number = to.joined(from.name.as_str(), 1);
        to.keeps(number, keys, 900_000..901_000);
    }
    let number = two.joined("one", 1);
    two.seen(|seen| {
        let member = &seen.members[&number];
        assert_eq!(member.peer.address, SocketAddr::new(all[0].ip(), all[0].port() + 1));
        assert!(member.keeps_asks, "it states so in its greeting");
        assert_eq!(member.rdma, Some(SocketAddr::new(all[0].ip(), all[0].port() + 2)));
    });
    // Changes arrive at both followers.
    one.publish(removed(0..500));
    one.publish(added(2000..2100));
    for other in [&two, &three] {
        let number = other.joined("one", 1);
        other.keeps(number, 500..1000, 0..500);
        other.keeps(number, 2000..2100, 0..500);
        other.seen(|seen| {
            assert_eq!(seen.members.len(), 2, "itself is no member");
            let own = other.control().listen_address().unwrap().to_string();
            assert!(!seen.notes.iter().any(|note| note.contains(&own)), "and nothing is said of it");
            assert_eq!(seen.members[&number].snapshots, 1);
        });
    }
}

#[test]
fn a_leaving_node_says_so_once_and_lists_its_blocks_for_members() {
    let all = [address(), address()];
    let namespace = NamespaceDigest([7; 16]);
    let mut plan = Plan::listing("one", all[0], &all);
    plan.listing = Arc::new(Listed(namespace));
    let one = plan.start();
    let two = Plan::listing("two", all[1], &all).start();
    let number = two.joined("one", 1);
    one.joined("two", 1);
    let ask = BlocksAsk { namespace, block_bytes: 1 << 20, blocks: 10 };
    two.control().ask_blocks(number, ask);
    let other = BlocksAsk { namespace: NamespaceDigest([8; 16]), ..ask };
    two.control().ask_blocks(number, other);
    let lists = two.wait("two lists", |seen| {
        let lists = &seen.members.get(&number)?.lists;
        (lists.len() == 2).then(|| lists.clone())
    });
    for (asked, blocks) in [(ask, two_blocks()), (other, Vec::new())] {
        assert!(lists.contains(&(asked, blocks)), "{lists:?}");
    }
    one.control().leave();
    two.wait("the leave", |seen| (seen.members.get(&number)?.leaving == 1).then_some(()));
    // The stream goes on, also a new one, which states the leave again.
    one.publish(added(0..10));
    two.keeps(number, 0..10, 100..200);
    two.control().resync(number);
    two.wait("the leave again", |seen| (seen.members.get(&number)?.leaving == 2).then_some(()));
}

#[test]
fn what_is_promised_is_told_and_told_anew_over_another_stream() {
    let (mut one, two) = pair();
    let promises = |number, these: Vec<Digest>, times| {
        two.wait(&format!("promises {these:?}"), |seen| {
            let (promised, told) = &seen.members.get(&number)?.promises;
            (*promised == these && *told >= times).then_some(())
        });
    };
    one.publish(added(0..10));
    one.control().promise(vec![digest(20), digest(30)]);
    let number = two.joined("one", 1);
    promises(number, vec![digest(20), digest(30)], 1);
    two.control().resync(number);
    promises(number, vec![digest(20), digest(30)], 2);
    one.control().promise(vec![digest(30)]);
    one.publish(added(20..21));
    promises(number, vec![digest(30)], 3);
    two.keeps(number, 0..10, 100..200);
    one.stop();
    two.wait("silence", |seen| (seen.members[&number].stale == 1).then_some(()));
}

#[test]
fn a_caller_that_is_behind_is_told_no_more_than_it_may_have_before_it() {
    const BEHIND_MAX: usize = 1 << 16;
    let all = [address(), address()];
    let one = Plan::listing("one", all[0], &all).start();
    let held = Arc::new(Mutex::new(Vec::new()));
    let hold = Arc::clone(&held);
    let plan = Plan::listing("two", all[1], &all);
    let _two = Control::start(plan.config(), move |news| hold.lock().unwrap().push(news)).unwrap();
    let wait = |what: &str, is_so: &dyn Fn(&[MemberEvent]) -> bool| {
        let end = now() + WATCHDOG;
        while !is_so(&held.lock().unwrap()) {
            assert!(now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let changes = |held: &[MemberEvent]| -> usize {
        let changes = held.iter().map(|news| match news {
            MemberEvent::Changes { changes, .. } => changes.len(),
            _ => 0,
        });
        changes.sum()
    };
    wait("all that is kept", &|held| held.iter().any(|news| matches!(news, MemberEvent::Snapshot { .. })));
    (0..40).for_each(|part| one.publish(added(8000 * part..8000 * (part + 1))));
    wait("as much as it may", &|held| changes(held) > BEHIND_MAX / 4 * 3);
    std::thread::sleep(Duration::from_millis(500));
    assert!(changes(&held.lock().unwrap()) <= BEHIND_MAX);
    held.lock().unwrap().clear();
    wait("more", &|held| changes(held) > 0);
}

#[test]
fn who_comes_late_is_dialled_as_soon_as_it_follows() {
    let all = [address(), address()];
    // No node is dialled again by itself after a failure.
    let limits = ControlLimits { back_off_min: WATCHDOG * 2, back_off_max: WATCHDOG * 2, ..patient() };
    let one = Plan { limits, ..Plan::listing("one", all[0], &all) }.start();
    one.noted(&format!("the inventory of {} is not followed", all[1]));
    let plan = Plan::listing("two", all[1], &all);
    let mut two = plan.start();
    two.joined("one", 1);
    let before = one.joined("two", 1);
    two.stop();
    one.wait("silence", |seen| (seen.members[&before].stale == 1).then_some(()));
    let two = Plan { life: 2, ..plan }.start();
    two.joined("one", 1);
    one.joined("two", 2);
}

#[test]
fn strangers_that_follow_make_nobody_dial_in_a_loop() {
    let (at, silent) = (address(), TcpListener::bind(address()).unwrap());
    let limits = ControlLimits { back_off_min: WATCHDOG * 2, back_off_max: WATCHDOG * 2, ..patient() };
    let began = now();
    let one = Plan { limits, ..Plan::listing("one", at, &[silent.local_addr().unwrap()]) }.start();
    let (dialled, dials) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in silent.incoming() {
            drop(stream.unwrap());
            if dialled.send(()).is_err() {
                break;
            }
        }
    });
    one.noted("is not followed");
    for life in 1..=30 {
        Plan { life, ..Plan::listing("stranger", address(), &[at]) }.start().joined("one", 1);
    }
    // The first attempt, one for an unknown follower, and one for each second since.
    let dials = dials.try_iter().count() as u64;
    let seconds = began.elapsed().as_secs();
    assert!((2..=seconds + 2).contains(&dials), "{dials} in {seconds} s");
}

#[test]
fn another_life_of_a_node_is_another_member() {
    let (one, mut two) = pair();
    one.publish(added(0..10));
    two.publish(added(100..110));
    let (before, of_one) = (one.joined("two", 1), two.joined("one", 1));
    one.keeps(before, 100..110, 0..10);
    two.keeps(of_one, 0..10, 100..110);
    let plan = {
        let address = two.control().listen_address().unwrap();
        Plan { life: 2, ..Plan::listing("two", address, &[one.control().listen_address().unwrap()]) }
    };
    two.stop();
    one.wait("silence", |seen| (seen.members[&before].stale == 1).then_some(()));
    one.seen(|seen| assert!(seen.left.is_empty(), "it may come back"));
    let two = plan.start();
    two.publish(added(200..210));
    let after = one.joined("two", 2);
    assert_eq!(one.left(before), Parting::Restarted);
    one.keeps(after, 200..210, 100..110);
    let of_one = two.joined("one", 1);
    two.keeps(of_one, 0..10, 100..110);
}

#[test]
fn a_stream_that_breaks_goes_on_where_it_was() {
    let all = [address(), address()];
    let two = Plan::listing("two", all[1], &[all[0]]).start();
    let proxy = Proxy::start(all[1], Troubles::default());
    let one = Plan::listing("one", all[0], &[proxy.address]).start();
    two.publish(added(0..100));
    let number = one.joined("two", 1);
    one.keeps(number, 0..100, 1000..2000);
    for round in 1..4 {
        proxy.cut();
        one.wait("silence", |seen| (seen.members[&number].stale >= round).then_some(()));
        let next = u64::from(round) * 10_000;
        two.publish(added(next..next + 100));
        one.keeps(number, next..next + 100, 1000..2000);
    }
    one.seen(|seen| {
        assert_eq!(seen.members[&number].snapshots, 1, "what was known stayed known");
        assert!(seen.left.is_empty());
    });
    // The whole inventory again, at the caller's request.
    one.control().resync(number);
    one.wait("a snapshot", |seen| (seen.members[&number].snapshots == 2).then_some(()));
    one.keeps(number, 0..100, 1000..2000);
}

#[test]
fn a_node_that_is_silent_for_long_is_left_until_it_is_back() {
    let all = [address(), address()];
    let limits = ControlLimits { gone: Duration::from_millis(500), ..patient() };
    let one = Plan { limits, ..Plan::listing("one", all[0], &all) }.start();
    let plan = Plan::listing("two", all[1], &all);
    let mut two = plan.start();
    two.publish(added(0..10));
    let before = one.joined("two", 1);
    one.keeps(before, 0..10, 100..200);
    two.stop();
    assert_eq!(one.left(before), Parting::Silent);
    let two = plan.start();
    two.publish(added(20..30));
    let after = one.joined("two", 1);
    one.keeps(after, 20..30, 100..200);
    one.seen(|seen| assert_eq!(seen.members[&after].snapshots, 1, "nothing of before is kept"));
}

#[test]
fn a_network_that_goes_dark_is_noticed() {
    let all = [address(), address()];
    let two = Plan::listing("two", all[1], &[all[0]]).start();
    let proxy = Proxy::start(all[1], Troubles::down(Trouble::Stall(400_000)));
    let limits = ControlLimits { silence: Duration::from_millis(500), ..patient() };
    let one = Plan { limits, ..Plan::listing("one", all[0], &[proxy.address]) }.start();
    let number = one.joined("two", 1);
    two.publish(added(0..100_000));
    one.wait("silence", |seen| (seen.members[&number].stale > 0).then_some(()));
    proxy.trouble(Troubles::default());
    one.keeps(number, 0..100_000, 200_000..201_000);
    one.noted("took longer than 500 ms");
}

#[test]
fn a_follower_that_does_not_read_is_cut_off_and_harms_no_other() {
    let all = [address(), address(), address()];
    let limits = ControlLimits { silence: Duration::from_millis(500), ..patient() };
    let two = Plan { limits, ..Plan::listing("two", all[1], &[all[0], all[2]]) }.start();
    two.publish(added(0..500_000));
    // The follower reads some of it, and then nothing more; its own limits are longer.
    let proxy = Proxy::start(all[1], Troubles::down(Trouble::Stall(1_000_000)));
    let stuck = Plan::listing("one", all[0], &[proxy.address]).start();
    let number = stuck.joined("two", 1);
    let well = Plan::listing("three", all[2], &all[1..2]).start();
    let of_two = well.joined("two", 1);
    well.keeps(of_two, 0..500_000, 2_000_000..2_001_000);
    two.noted("has read nothing for 500 ms");
    two.publish(added(3_000_000..3_000_010));
    well.keeps(of_two, 3_000_000..3_000_010, 2_000_000..2_001_000);
    stuck.seen(|seen| assert!(seen.members[&number].filter.is_none()));
}

#[test]
fn nodes_of_another_mesh_or_of_one_name_are_told_the_remedy() {
    let all = [address(), address()];
    let limits = ControlLimits { gone: Duration::from_millis(500), ..patient() };
    let one = Plan { limits, ..Plan::listing("one", all[0], &all) }.start();
    let other = Plan { mesh: "other", ..Plan::listing("two", all[1], &all) }.start();
    one.noted("belongs to the mesh 'other': give both the same --mesh-name");
    other.noted("this node belongs to the mesh 'test': give both the same --mesh-name");
    drop(other);
    let twin = Plan { life: 2, limits, ..Plan::listing("one", all[1], &all) }.start();
    for node in [&one, &twin] {
        node.noted("give each its own --node-id");
        node.seen(|seen| assert!(seen.members.is_empty()));
    }
}

#[test]
fn a_peer_that_keeps_more_than_fits_is_followed_in_part() {
    let all = [address(), address()];
    let one = Plan { directory_bytes: 0, ..Plan::listing("one", all[0], &all) }.start();
    let two = Plan::listing("two", all[1], &all).start();
    two.publish(added(0..50_000));
    let number = one.joined("two", 1);
    one.noted("of which 16384 fit");
    let (thinning, keys) = one.wait("a part", |seen| {
        let filter = seen.members[&number].filter.as_ref()?;
        let part = filter.thinning().power() > 0;
        part.then_some((filter.thinning(), filter.len()))
    });
    assert!(thinning.power() == 2 && (10_000..15_000).contains(&keys), "{thinning:?} {keys}");
}

#[test]
fn a_peer_of_which_a_part_is_followed_is_followed_whole_once_it_fits() {
    let all = [address(), address()];
    let limits = ControlLimits { thinned: Duration::from_millis(200), ..patient() };
    let one = Plan { directory_bytes: 0, limits, ..Plan::listing("one", all[0], &all) }.start();
    let two = Plan::listing("two", all[1], &all).start();
    two.publish(added(0..50_000));
    let number = one.joined("two", 1);
    let power = |seen: &Seen| Some(seen.members[&number].filter.as_ref()?.thinning().power());
    one.wait("a part", |seen| (power(seen)? > 0).then_some(()));
    two.publish(removed(0..45_000));
    one.noted("a larger part is requested");
    one.wait("all of it", |seen| (power(seen)? == 0).then_some(()));
    one.keeps(number, 45_000..50_000, 0..45_000);
    one.seen(|seen| assert!(seen.left.is_empty()));
}

#[test]
fn mutual_tls_carries_inventories_and_new_files_are_used_without_a_restart() {
    let (ca, next) = (Authority::new(), Authority::new());
    let all = [address(), address()];
    let files = [Folder::with(&ca, &ca, NAME, 2099), Folder::with(&ca, &ca, NAME, 2021)];
    let node = |name, at: usize| {
        let security = Security::Tls(files[at].tls());
        Plan { security, ..Plan::listing(name, all[at], &all) }.start()
    };
    let (one, two) = (node("one", 0), node("two", 1));
    one.noted("give both nodes unexpired certificates");
    one.seen(|seen| assert!(seen.members.is_empty()));
    files[1].write(&ca, &ca, NAME, 2099);
    two.publish(added(0..10));
    let number = one.joined("two", 1);
    one.keeps(number, 0..10, 100..200);
    // A node without a certificate of the mesh is not served, and not followed.
    let stranger = {
        let at = address();
        Plan { life: 7, ..Plan::listing("stranger", at, &all) }.start()
    };
    stranger.wait("a refusal", |seen| (seen.notes.len() >= 2).then_some(()));
    stranger.seen(|seen| assert!(seen.members.is_empty()));
    one.refused(Reason::Certificate, 1);
    two.refused(Reason::Certificate, 1);
    // The mesh moves to another authority, one node after the other.
    let mut one = one;
    one.stop();
    files[1].write(&next, &next, NAME, 2099);
    let one = node("one", 0);
    one.noted("no TLS session");
    files[0].write(&next, &next, NAME, 2099);
    let number = one.joined("two", 1);
    one.keeps(number, 0..10, 100..200);
}

#[test]
fn connections_that_say_nothing_make_room_for_peers() {
    let ca = Authority::new();
    let all = [address(), address()];
    let files = Folder::with(&ca, &ca, NAME, 2099);
    let node = |name, at: usize| {
        let security = Security::Tls(files.tls());
        Plan { security, ..Plan::listing(name, all[at], &all) }.start()
    };
    let one = node("one", 0);
    let mut silent: Vec<_> = (0..257).map(|_| TcpStream::connect(all[0]).unwrap()).collect();
    silent[0].set_read_timeout(Some(WATCHDOG)).unwrap();
    assert!(matches!(silent[0].read(&mut [0; 8]), Ok(0)), "the oldest is hung up on");
    let two = node("two", 1);
    two.joined("one", 1);
    one.refused(Reason::Full, 1);
    // A slow connection stays while there is room.
    let last = silent.last_mut().unwrap();
    last.set_nonblocking(true).unwrap();
    assert!(last.read(&mut [0; 8]).is_err(), "the last one is not");
}

#[test]
fn members_tell_their_namespaces_to_who_asks() {
    let all = [address(), address(), address()];
    let counting = |blocks: &[u64]| {
        let all = blocks.iter().copied().map(namespace_of).collect();
        Arc::new(Counting { all, counts: AtomicU64::new(0) })
    };
    let (few, many) = (counting(&[0, 7]), counting(&(0..80).collect::<Vec<u64>>()));
    let one = Plan::listing("one", all[0], &all).start();
    let two = Plan { listing: Arc::clone(&few) as _, ..Plan::listing("two", all[1], &all) }.start();
    let three = Plan { listing: Arc::clone(&many) as _, ..Plan::listing("three", all[2], &all) }.start();
    for name in ["two", "three"] {
        one.joined(name, 1);
    }
    let asked_since = now();
    let answers = one.ask();
    let names: Vec<_> = answers.iter().map(|answer| answer.peer.as_str()).collect();
    assert_eq!(names, ["three", "two"]);
    assert_eq!(answers[1].namespaces, [namespace_of(7), namespace_of(0)], "those first that are kept most");
    assert_eq!(answers[1].missing, None);
    // A reply has its limit, and counts the namespaces left out.
    let told = answers[0].namespaces.len();
    assert!((40..80).contains(&told), "{told}");
    let most: Vec<_> = (0..80).rev().take(told).map(namespace_of).collect();
    assert_eq!(answers[0].namespaces, most);
    let left_out = format!("{} of its namespaces are left out, because the limit is reached", 80 - told);
    assert_eq!(answers[0].missing, Some(left_out));
    // Frequent questions do not make a node count each time.
    for _ in 0..30 {
        assert_eq!(one.ask()[1].namespaces.len(), 2);
    }
    let counts_max = asked_since.elapsed().as_secs() + 2;
    assert!(few.counts.load(Ordering::Relaxed) <= counts_max.min(30));
    drop((two, three));
}

#[test]
fn what_cannot_be_is_refused_at_start_with_the_remedy() {
    let said = |plan: Plan, what: &str| {
        let Err(error) = Control::start(plan.config(), drop) else { panic!("{what}") };
        assert!(error.to_string().contains(what), "{error}");
    };
    let good = Plan::listing("one", address(), &[]);
    said(Plan { listen: "0.0.0.0:17311".parse().unwrap(), ..good.clone() }, "such as the pod's IP");
    said(Plan { mesh: "a/b", ..good.clone() }, "'a/b' cannot be");
    for wrong in ["", "host", ":1", "host:0", "http://host:1", "host:65536"] {
        said(Plan { members: Members::Static(vec![wrong.into()]), ..good.clone() }, "pass host:port");
    }
    said(Plan { members: Members::Static(vec!["host:1".into(); 1025]), ..good.clone() }, "at most 1024");
    let running = good.start();
    said(good, "a free address");
    drop(running);
}

#[test]
fn a_sidecar_with_the_name_of_a_live_member_is_refused_and_both_sides_say_so() {
    let all = [address(), address(), address()];
    let one = Plan::listing("one", all[0], &all[..2]).start();
    let two = Plan::listing("two", all[1], &all[..1]).start();
    let member = one.joined("two", 1);
    // An unknown node: its address is not listed.
    let twin = Plan { life: 2, ..Plan::listing("two", all[2], &all[..1]) }.start();
    let holder = format!("the live member at {}", all[1]);
    one.noted(&format!("because it has the name two, which {holder} has: give each its own --node-id"));
    twin.noted(&format!("{holder} has the name two, too: give each its own --node-id"));
    one.refused(Reason::Name, 1);
    twin.refused(Reason::Refused, 1);
    // A follower with the name of the node itself.
    let own = Plan { life: 2, ..Plan::listing("one", address(), &all[..1]) }.start();
    own.noted("the node one itself has the name one, too: give each its own --node-id");
    one.seen(|seen| assert!(seen.members.contains_key(&member) && seen.left.is_empty()));
    // Both have tried again and again.
    one.refused(Reason::Name, 10);
    one.seen(|seen| assert_eq!(seen.notes.iter().filter(|note| note.contains("the name two")).count(), 1));
    drop(two);
    one.wait("silence", |seen| (seen.members[&member].stale > 0).then_some(()));
    twin.joined("one", 1);
}
