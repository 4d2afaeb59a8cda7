//! Observers: they learn what members keep, are members of nothing, and take no member's place.

mod rig;

use mesh::control::service::inventory_client::InventoryClient;
use mesh::control::wire::namespaces::NamespacesRequest;
use mesh::control::wire::{FollowRequest, Said, VERSION};
use mesh::control::{Members, OBSERVERS_MAX};
use mesh::refusals::Reason;
use mesh::tls::Security;
use rig::certificates::{Authority, Folder, NAME};
use rig::crew::{Crew, Plan, added, address};
use tonic::Code;
use tonic::transport::Channel;

async fn connect(at: String) -> InventoryClient<Channel> {
    InventoryClient::new(Channel::from_shared(at).unwrap().connect().await.expect("a server"))
}

#[test]
fn an_observer_knows_members_their_blocks_and_engines_and_is_no_member() {
    let all = [address(), address()];
    let engines = vec!["http://10.0.0.1:8000=both".parse().unwrap()];
    let one = Plan { engines: engines.clone(), ..Plan::listing("one", all[0], &all) }.start();
    let two = Plan::listing("two", all[1], &all).start();
    one.publish(added(0..100));
    let observing = |life| Plan { observes: true, life, ..Plan::listing("router", address(), &all) };
    let routers: Vec<Crew> = [1, 2].map(|life| observing(life).start()).into();
    for router in &routers {
        assert_eq!(router.control().listen_address(), None);
        let number = router.joined("one", 1);
        router.keeps(number, 0..100, 900..1000);
        router.joined("two", 1);
        router.seen(|seen| {
            assert_eq!(seen.members[&number].engines, engines);
            assert_eq!(seen.members[&number].promises.1, 0, "an observer asks for no promises");
        });
        assert_eq!(router.ask().len(), 2, "members answer it");
    }
    for (member, other) in [(&one, "two"), (&two, "one")] {
        member.joined(other, 1);
        member.seen(|seen| assert_eq!(seen.members.len(), 1, "no router is a member"));
    }
    one.publish(added(100..110));
    for router in &routers {
        router.keeps(router.joined("one", 1), 100..110, 900..1000);
    }
}

#[test]
fn an_observer_needs_a_certificate_of_the_mesh() {
    let (ca, strange) = (Authority::new(), Authority::new());
    let all = [address(), address()];
    let good = Folder::with(&ca, &ca, NAME, 2099);
    let with = |files: &Folder| Security::Tls(files.tls());
    let engines = vec!["http://10.0.0.1:8000=both".parse().unwrap()];
    let member = |name, at: usize| Plan { security: with(&good), ..Plan::listing(name, all[at], &all) };
    let one = Plan { engines: engines.clone(), ..member("one", 0) }.start();
    let two = member("two", 1).start();
    one.publish(added(0..100));
    let observing =
        |name, security| Plan { observes: true, security, ..Plan::listing(name, address(), &all) };
    // A certificate of another authority, an expired one, trust in another authority, and none.
    let bad = [(&strange, &ca, 2099), (&ca, &ca, 2021), (&ca, &strange, 2099)]
        .map(|(by, trusted, year)| Folder::with(by, trusted, NAME, year));
    let others: Vec<Crew> = bad.iter().map(|files| observing("other", with(files)).start()).collect();
    let plain = observing("plain", Security::Plaintext).start();
    let files = Folder::with(&ca, &ca, "router", 2021);
    let router = observing("router", with(&files)).start();
    for refused in others.iter().chain([&plain, &router]) {
        refused.wait("a note of each member", |seen| (seen.notes.len() >= 2).then_some(()));
        refused.seen(|seen| assert!(seen.members.is_empty()));
    }
    one.refused(Reason::Certificate, 4);
    // New files are used without a restart. A router may have a name of its own.
    files.write(&ca, &ca, "router", 2099);
    let number = router.joined("one", 1);
    router.keeps(number, 0..100, 900..1000);
    router.joined("two", 1);
    router.seen(|seen| assert_eq!(seen.members[&number].engines, engines));
    assert_eq!(router.ask().len(), 2, "members answer it");
    one.publish(added(100..110));
    router.keeps(number, 100..110, 900..1000);
    for member in [&one, &two] {
        member.seen(|seen| assert_eq!(seen.members.len(), 1, "no router is a member"));
    }
}

#[test]
fn observers_have_places_of_their_own() {
    let one = Plan::new("one", address(), Members::Static(Vec::new())).start();
    let at = format!("http://{}", one.control().listen_address().unwrap());
    let request = |observes| FollowRequest {
        version: VERSION,
        mesh: "test".into(),
        node: "router".into(),
        boot: 1,
        observes,
        ..FollowRequest::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut streams = Vec::new();
        for _ in 0..OBSERVERS_MAX {
            let mut client = connect(at.clone()).await;
            streams.push((client.follow(request(true)).await.expect("a place").into_inner(), client));
        }
        let refused = connect(at.clone()).await.follow(request(true)).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("64 routers"), "{refused}");
        let (mesh, node) = ("test".to_owned(), "router".to_owned());
        let asked = NamespacesRequest { version: VERSION, mesh, node, boot: 1, observes: true };
        connect(at.clone()).await.namespaces(asked).await.unwrap_err();
        let mut client = connect(at.clone()).await;
        let mut replies = client.follow(request(false)).await.expect("a member's place").into_inner();
        let first = replies.message().await.unwrap().unwrap();
        assert!(matches!(first.said, Some(Said::Hello(_))));
        // The place of an observer that has left is free.
        streams.pop();
        loop {
            if connect(at.clone()).await.follow(request(true)).await.is_ok() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    });
    one.refused(Reason::Full, 2);
}
