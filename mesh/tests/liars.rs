//! Peers that break the protocol, on both sides of a stream: each is noted with the reason, and harms no
//! other.

mod rig;

use std::cell::Cell;
use std::io::Read;
use std::net::TcpStream;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mesh::control::service::inventory_client::InventoryClient;
use mesh::control::service::inventory_server::{Inventory, InventoryServer};
use mesh::control::wire::blocks::{ListBlocksReply, ListBlocksRequest};
use mesh::control::wire::namespaces::{NamespaceMessage, NamespacesReply, NamespacesRequest};
use mesh::control::wire::{
    Begin, CheckedReply, Delta, DigestChunk, FollowHeartbeat, FollowHello, FollowPromises, FollowReply,
    FollowRequest, Said, ServerFeatures, VERSION, WaitReply, WaitRequest,
};
use mesh::control::{ControlLimits, Members};
use mesh::listed::{BlocksAsk, LISTED_MAX};
use mesh::refusals::Reason;
use rig::crew::{Crew, Plan, added, address, digest, patient};
use rig::{LONG, now};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

/// A client of a member's inventory.
async fn connect(uri: String) -> InventoryClient<Channel> {
    let endpoint = Endpoint::from_shared(uri).expect("it is an address");
    InventoryClient::new(endpoint.connect().await.expect("it serves"))
}

/// A server with a fixed script for any client, and then silence.
#[derive(Clone)]
struct Liar {
    script: Arc<Vec<Said>>,
    asked: Arc<Mutex<Vec<FollowRequest>>>,
    namespaces: NamespacesScript,
    /// `None`: the method is unknown to it.
    blocks: Option<ListBlocksReply>,
}

/// A liar's answer about namespaces.
#[derive(Clone)]
enum NamespacesScript {
    /// The method is unknown to it.
    Unknown,
    Never,
    Reply(NamespacesReply),
}

#[tonic::async_trait]
impl Inventory for Liar {
    type FollowStream = Pin<Box<dyn Stream<Item = Result<FollowReply, Status>> + Send>>;

    async fn follow(&self, request: Request<FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        self.asked.lock().unwrap().push(request.into_inner());
        let script: Vec<_> =
            self.script.iter().cloned().map(|said| Ok(FollowReply { said: Some(said) })).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(script).chain(tokio_stream::pending()))))
    }

    async fn namespaces(&self, _: Request<NamespacesRequest>) -> Result<Response<NamespacesReply>, Status> {
        match &self.namespaces {
            NamespacesScript::Unknown => Err(Status::unimplemented("")),
            NamespacesScript::Never => std::future::pending().await,
            NamespacesScript::Reply(reply) => Ok(Response::new(reply.clone())),
        }
    }

    async fn list_blocks(&self, _: Request<ListBlocksRequest>) -> Result<Response<ListBlocksReply>, Status> {
        self.blocks.clone().map(Response::new).ok_or_else(|| Status::unimplemented(""))
    }

    async fn wait(&self, _: Request<WaitRequest>) -> Result<Response<WaitReply>, Status> {
        Err(Status::unimplemented("a liar does not listen"))
    }
}

/// Starts a liar on a thread of its own, until the process ends. Returns its address.
fn liar(script: Vec<Said>) -> (String, Liar) {
    liar_of(script, NamespacesScript::Unknown)
}

fn liar_of(script: Vec<Said>, namespaces: NamespacesScript) -> (String, Liar) {
    start_liar(Liar { script: Arc::new(script), asked: Arc::default(), namespaces, blocks: None })
}

fn start_liar(liar: Liar) -> (String, Liar) {
    let address = address();
    let service = InventoryServer::new(liar.clone());
    let serving = tonic::transport::Server::builder().add_service(service).serve(address);
    std::thread::spawn(move || runtime().block_on(serving));
    (address.to_string(), liar)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn request() -> FollowRequest {
    let (mesh, node) = ("test".into(), "tester".into());
    FollowRequest { version: VERSION, mesh, node, boot: 1, ..FollowRequest::default() }
}

fn hello() -> FollowHello {
    let (mesh, node, tcp) = ("test".into(), "liar".into(), "127.0.0.1:9".into());
    FollowHello { version: VERSION, mesh, node, boot: 1, tcp, ..FollowHello::default() }
}

fn begin(sequence: u64, keys: u64) -> Said {
    Said::Begin(Begin { sequence, keys, thinning: 0 })
}

fn chunk(sequence: u64, mut digests: Vec<u64>, last: bool) -> Said {
    digests.sort_unstable();
    Said::Chunk(DigestChunk { sequence, digests, last })
}

fn promises(digests: Vec<u64>) -> Said {
    Said::Promises(FollowPromises { digests })
}

fn delta(after: u64, sequence: u64, added: Vec<u64>) -> Said {
    Said::Delta(Delta { after, sequence, removed: Vec::new(), added })
}

#[test]
fn a_server_that_lies_is_told_of_and_harms_no_other() {
    let count = Cell::new(0);
    let greeted = |rest: Vec<Said>| {
        count.set(count.get() + 1);
        let hello = FollowHello { node: format!("liar-{}", count.get()), ..hello() };
        [Said::Hello(hello)].into_iter().chain(rest).collect::<Vec<_>>()
    };
    let keys = |count: u64| (0..count).map(|number| digest(number).0).collect::<Vec<_>>();
    let lies = [
        (vec![], "the next message took longer than"),
        (vec![Said::Heartbeat(FollowHeartbeat {})], "did not send its name"),
        (vec![Said::Hello(FollowHello { version: 9, ..hello() })], "version 9 of the protocol"),
        (vec![Said::Hello(FollowHello { mesh: "x".into(), ..hello() })], "belongs to the mesh 'x'"),
        (vec![Said::Hello(FollowHello { node: "a b".into(), ..hello() })], "a greeting with an invalid name"),
        (vec![Said::Hello(FollowHello { boot: 0, ..hello() })], "a greeting with an invalid life"),
        (
            vec![Said::Hello(FollowHello { tcp: "nowhere".into(), ..hello() })],
            "a greeting with an invalid address",
        ),
        (
            vec![Said::Hello(FollowHello { rdma: "x".repeat(5000), ..hello() })],
            "a greeting with an invalid RDMA address",
        ),
        (
            vec![Said::Hello(FollowHello { mesh: "x".repeat(64), ..hello() })],
            "a greeting with an invalid mesh",
        ),
        (greeted(vec![Said::Hello(hello())]), "it sent two greetings"),
        (greeted(vec![chunk(1, keys(1), true)]), "has not begun"),
        (greeted(vec![Said::Begin(Begin { sequence: 1, keys: 1, thinning: 99 })]), "an invalid thinning"),
        (
            greeted(vec![
                begin(1, 10),
                Said::Chunk(DigestChunk { sequence: 1, digests: vec![2, 1], last: true }),
            ]),
            "out of order",
        ),
        (greeted(vec![begin(1, 10), chunk(1, keys(32_100), true)]), "of 32000 at most"),
        (greeted(vec![promises(keys(1))]), "has not begun"),
        (greeted(vec![begin(1, 0), chunk(1, vec![], true), promises(keys(8_193))]), "of 8192 at most"),
        (greeted(vec![begin(1, 10), chunk(1, keys(50_000), true)]), "decoded message length too large"),
        (greeted(vec![begin(1, 10), chunk(1, keys(30_000), true)]), "outgrew its filter"),
        (greeted(vec![begin(1, 0), chunk(1, vec![], true), delta(7, 8, keys(1))]), "from sequence 7"),
    ];
    let (mut addresses, words): (Vec<_>, Vec<_>) =
        lies.map(|(script, word)| (liar(script).0, word)).into_iter().unzip();
    let sound = Plan::listing("sound", address(), &[]).start();
    sound.publish(added(0..1000));
    addresses.push(sound.control().listen_address().unwrap().to_string());
    let limits = ControlLimits { silence: Duration::from_millis(800), ..patient() };
    let one = Plan { limits, ..Plan::new("one", address(), Members::Static(addresses.clone())) }.start();
    for (address, word) in addresses.iter().zip(words) {
        one.wait(word, |seen| {
            seen.notes.iter().any(|note| note.contains(address) && note.contains(word)).then_some(())
        });
    }
    for (reason, lies) in
        [(Reason::Version, 1), (Reason::Mesh, 1), (Reason::Silent, 1), (Reason::Malformed, 7)]
    {
        one.refused(reason, lies);
    }
    let number = one.joined("sound", 1);
    one.keeps(number, 0..1000, 900_000..901_000);
    sound.publish(added(2000..2100));
    one.keeps(number, 2000..2100, 900_000..901_000);
}

#[test]
fn after_a_gap_all_is_asked_for_anew() {
    let keys: Vec<_> = (0..100).map(|number| digest(number).0).collect();
    let script = vec![
        Said::Hello(hello()),
        begin(5, 100),
        chunk(5, keys, true),
        delta(5, 6, vec![digest(200).0]),
        delta(7, 8, vec![1]),
    ];
    let (address_of, liar) = liar(script);
    let one = Plan::new("one", address(), Members::Static(vec![address_of])).start();
    let number = one.joined("liar", 1);
    one.wait("all of it, twice", |seen| (seen.members[&number].snapshots >= 2).then_some(()));
    one.keeps(number, 0..100, 900_000..901_000);
    one.noted("changes from sequence 7 to 8, while 6 is known");
    let asked = liar.asked.lock().unwrap();
    assert!(asked.iter().all(|asked| (asked.known_boot, asked.known_sequence) == (0, 0)), "{asked:?}");
    assert_eq!((asked[0].version, asked[0].mesh.as_str(), asked[0].node.as_str()), (VERSION, "test", "one"));
}

#[test]
fn a_peer_that_outgrows_what_it_announced_is_asked_again_after_longer_and_longer_pauses() {
    let growth = (0..5u64).map(|batch| {
        let keys = (8_000 * batch..8_000 * (batch + 1)).map(|number| digest(number).0);
        delta(1 + batch, 2 + batch, keys.collect())
    });
    let script = [Said::Hello(hello()), begin(1, 0), chunk(1, vec![], true)].into_iter().chain(growth);
    let (address_of, liar) = liar(script.collect());
    let limits = ControlLimits { back_off_min: Duration::from_millis(150), back_off_max: LONG, ..patient() };
    let began = now();
    let one = Plan { limits, ..Plan::new("one", address(), Members::Static(vec![address_of])) }.start();
    let number = one.joined("liar", 1);
    one.wait("six snapshots", |seen| (seen.members[&number].snapshots >= 6).then_some(()));
    // Each pause is at least half of 150, 300, 600, 1,200 and 2,400 ms: a busy machine takes a second without
    // any.
    assert!(began.elapsed() >= Duration::from_millis(2_325), "{:?}", began.elapsed());
    assert!(one.seen(|seen| seen.left.is_empty()) && liar.asked.lock().unwrap().len() >= 6);
}

/// A namespace whose facts match its digest.
fn namespace_message(model: &str) -> NamespaceMessage {
    let facts = Facts::from([("model".to_owned(), model.to_owned())]);
    let digest = namespace::digest_facts(&facts).0.to_vec();
    NamespaceMessage { digest, facts, block_bytes: 64, shards: 2, memory_blocks: 3, disk_blocks: 0 }
}

/// Lets a node ask a member for its namespaces, with this reply. Returns the node, the number it takes, and
/// its text about the rest.
fn asked(namespaces: NamespacesScript, limits: ControlLimits) -> (Crew, usize, String) {
    let (at, _) = liar_of(vec![Said::Hello(hello()), begin(1, 0), chunk(1, vec![], true)], namespaces);
    let one = Plan { limits, ..Plan::new("one", address(), Members::Static(vec![at])) }.start();
    one.joined("liar", 1);
    let answers = one.ask();
    let [answer] = &answers[..] else { panic!("{answers:?}") };
    let found = (answer.namespaces.len(), answer.missing.clone().unwrap_or_default());
    (one, found.0, found.1)
}

/// Invalid namespaces, and one listed twice.
fn wrong_namespaces() -> Vec<NamespaceMessage> {
    let facts = |count: usize| (0..count).map(|at| (at.to_string(), String::new())).collect::<Facts>();
    let good = namespace_message("good");
    let many = NamespaceMessage {
        digest: namespace::digest_facts(&facts(257)).0.to_vec(),
        facts: facts(257),
        ..good.clone()
    };
    vec![
        NamespaceMessage { digest: vec![7; 16], ..namespace_message("another digest") },
        NamespaceMessage { digest: vec![7; 15], ..namespace_message("no digest") },
        NamespaceMessage { block_bytes: 0, ..namespace_message("no bytes") },
        NamespaceMessage { block_bytes: 65, ..namespace_message("no halves") },
        NamespaceMessage { shards: 0, ..namespace_message("no shards") },
        NamespaceMessage { facts: Facts::new(), ..namespace_message("no facts, and a size") },
        many,
        good,
    ]
}

#[test]
fn what_a_peer_says_of_namespaces_is_believed_as_far_as_it_can_be_checked() {
    let reply = |namespaces: Vec<NamespaceMessage>| {
        let (mesh, node) = ("test".into(), "liar".into());
        NamespacesReply { version: VERSION, mesh, node, boot: 1, namespaces, left_out: 0 }
    };
    let (good, wrong) = (namespace_message("good"), wrong_namespaces());
    let dropped = format!("{} of its namespaces are dropped", wrong.len());
    let all = [vec![good.clone()], wrong].concat();
    let late = ControlLimits { namespaces: Duration::from_millis(300), ..patient() };
    let long = namespace_message(&"x".repeat(5 << 20));
    let lies = [
        (reply(all), 1, dropped.as_str(), Some(Reason::Malformed)),
        (NamespacesReply { left_out: 5, ..reply(vec![good.clone()]) }, 1, "5 of its", None),
        (reply(vec![long]), 0, "decoded message length too large", Some(Reason::Malformed)),
        (NamespacesReply { mesh: "x".into(), ..reply(vec![]) }, 0, "mesh 'x'", Some(Reason::Mesh)),
        (NamespacesReply { version: 9, ..reply(vec![]) }, 0, "version 9", Some(Reason::Version)),
        (NamespacesReply { node: "a b".into(), ..reply(vec![]) }, 0, "name", Some(Reason::Malformed)),
        (NamespacesReply { boot: 2, ..reply(vec![]) }, 0, "has restarted", Some(Reason::OtherLife)),
    ];
    let lies = lies.map(|(reply, taken, word, reason)| (NamespacesScript::Reply(reply), taken, word, reason));
    for (namespaces, taken, word, reason) in
        lies.into_iter().chain([(NamespacesScript::Unknown, 0, "upgrade it", None)])
    {
        let (one, found, missing) = asked(namespaces, patient());
        assert!(found == taken && missing.contains(word), "{found} of {taken}; {missing} for {word}");
        reason.into_iter().for_each(|reason| one.refused(reason, 1));
    }
    let (one, found, missing) = asked(NamespacesScript::Never, late);
    assert!(found == 0 && missing.contains("did not answer within 300 ms"), "{missing}");
    one.refused(Reason::Silent, 1);
}

#[test]
fn who_asks_for_namespaces_and_is_of_another_mesh_is_refused() {
    let one = Plan::listing("one", address(), &[]).start();
    let at = one.control().listen_address().unwrap();
    let (mesh, node) = ("test".into(), "tester".into());
    let request = NamespacesRequest { version: VERSION, mesh, node, boot: 1, observes: false };
    let ask = async |asked: NamespacesRequest| {
        let mut client = connect(format!("http://{at}")).await;
        client.namespaces(asked).await
    };
    runtime().block_on(async {
        for (wrong, word) in [
            (NamespacesRequest { version: 2, ..request.clone() }, "run the same release on every node"),
            (NamespacesRequest { mesh: "other".into(), ..request.clone() }, "--mesh-name"),
            (
                NamespacesRequest { node: "x".repeat(5000), ..request.clone() },
                "decoded message length too large",
            ),
        ] {
            let refused = ask(wrong).await.unwrap_err();
            assert!(refused.message().contains(word), "{refused}");
        }
        assert_eq!(ask(request).await.unwrap().into_inner().node, "one");
    });
    one.refused(Reason::Version, 1);
    one.refused(Reason::Mesh, 1);
}

#[test]
fn a_follower_that_is_frozen_is_hung_up_on() {
    let limits = ControlLimits { silence: Duration::from_millis(300), ..patient() };
    let one = Plan { limits, ..Plan::listing("one", address(), &[]) }.start();
    let runtime = runtime();
    let mut replies = runtime.block_on(async {
        let mut client = connect(format!("http://{}", one.control().listen_address().unwrap())).await;
        client.follow(request()).await.unwrap().into_inner()
    });
    // A client without its runtime is frozen.
    std::thread::sleep(Duration::from_secs(2));
    runtime.block_on(async {
        let ended = async { while let Ok(Some(_)) = replies.message().await {} };
        tokio::time::timeout(rig::WATCHDOG, ended).await.expect("an end");
    });
    one.refused(Reason::Silent, 1);
}

#[test]
fn a_follower_of_an_older_release_is_told_of_no_promises() {
    let one = Plan::listing("one", address(), &[]).start();
    one.publish(added(0..10));
    one.control().promise(vec![digest(5)]);
    let at = one.control().listen_address().unwrap();
    for hears_promises in [false, true] {
        runtime().block_on(async {
            let mut client = connect(format!("http://{at}")).await;
            let asked = FollowRequest { hears_promises, ..request() };
            let mut replies = client.follow(asked).await.expect("an answer").into_inner();
            let (mut namespace_message, mut beats) = (Vec::new(), 0);
            while beats < 3 {
                match replies.message().await.expect("a reply").expect("a stream").said {
                    Some(Said::Heartbeat(_)) => beats += 1,
                    Some(Said::Promises(promises)) => namespace_message.push(promises.digests),
                    said => assert!(said.is_some(), "a kind that the follower does not know"),
                }
            }
            let expected = hears_promises.then(|| vec![digest(5).0]);
            assert_eq!(namespace_message.pop(), expected);
        });
    }
}

#[test]
fn a_follower_that_is_wrong_is_refused_with_the_reason() {
    let limits = ControlLimits { connect: Duration::from_secs(4), ..patient() };
    let one = Plan { limits, ..Plan::listing("one", address(), &[]) }.start();
    one.publish(added(0..10));
    let at = one.control().listen_address().unwrap();
    let good = request();
    let follow = async |asked: FollowRequest| -> Result<FollowReply, Status> {
        let mut client = connect(format!("http://{at}")).await;
        let mut replies = client.follow(asked).await?.into_inner();
        Ok(replies.message().await?.expect("a first message"))
    };
    runtime().block_on(async {
        for (wrong, word) in [
            (FollowRequest { version: 2, ..good.clone() }, "run the same release on every node"),
            (FollowRequest { mesh: "other".into(), ..good.clone() }, "--mesh-name"),
            (FollowRequest { thinning: 300, ..good.clone() }, "an invalid thinning"),
            (FollowRequest { node: "x".repeat(5000), ..good.clone() }, "decoded message length too large"),
        ] {
            let refused = follow(wrong).await.unwrap_err();
            assert!(refused.message().contains(word), "{refused}");
        }
        let first =
            follow(FollowRequest { known_boot: 1, known_sequence: u64::MAX, ..good.clone() }).await.unwrap();
        assert!(matches!(first.said, Some(Said::Hello(FollowHello { boot: 1, .. }))));
        // A connection carries one stream.
        let mut client = connect(format!("http://{at}")).await;
        let _replies = client.follow(good.clone()).await.unwrap();
        let second =
            tokio::time::timeout(Duration::from_millis(300), client.clone().follow(good.clone())).await;
        assert!(!matches!(second, Ok(Ok(_))), "a second stream of a connection");
    });
    // A client that connects and sends nothing, or nothing valid, is hung up on.
    let mut silent = TcpStream::connect(at).unwrap();
    silent.set_read_timeout(Some(rig::WATCHDOG)).unwrap();
    let mut said = Vec::new();
    let end = silent.read_to_end(&mut said);
    assert!(end.is_ok() || end.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
    for (reason, wrong) in
        [(Reason::Version, 1), (Reason::Mesh, 1), (Reason::Malformed, 1), (Reason::Silent, 1)]
    {
        one.refused(reason, wrong);
    }
}

#[test]
fn a_greeting_of_an_earlier_release_states_no_features() {
    let reply = FollowReply { said: Some(Said::Hello(hello())) };
    let Ok(CheckedReply::Hello(_, _, features)) = reply.validate() else { panic!("a greeting") };
    assert_eq!(features, ServerFeatures::default());
}

/// A list of one block by the liar, without a parent.
fn list_of_one() -> ListBlocksReply {
    let (mesh, node) = ("test".into(), "liar".into());
    let (hashes, parents, uses) = (vec![1; 32], vec![0], vec![1.0]);
    ListBlocksReply { version: VERSION, mesh, node, boot: 1, hashes, parents, uses }
}

#[test]
fn a_list_with_an_invalid_block_is_no_list() {
    let good = list_of_one();
    assert_eq!(good.clone().validate().unwrap().3.len(), 1);
    let long = LISTED_MAX + 1;
    for wrong in [
        ListBlocksReply { hashes: vec![1; 31], ..good.clone() },
        ListBlocksReply { parents: vec![1], ..good.clone() },
        ListBlocksReply { parents: Vec::new(), ..good.clone() },
        ListBlocksReply { uses: vec![f32::NAN], ..good.clone() },
        ListBlocksReply { uses: vec![-1.0], ..good.clone() },
        ListBlocksReply { boot: 0, ..good.clone() },
        ListBlocksReply {
            hashes: vec![1; 32 * long],
            parents: vec![0; long],
            uses: vec![0.0; long],
            ..good.clone()
        },
    ] {
        assert!(wrong.clone().validate().is_err(), "{wrong:?}");
    }
}

#[test]
fn a_member_without_a_right_list_is_reported_to_have_none() {
    let script = || vec![Said::Hello(hello()), begin(1, 0), chunk(1, Vec::new(), true)];
    let wrong = ListBlocksReply { parents: vec![9], ..list_of_one() };
    let other_node = ListBlocksReply { node: "another".into(), ..list_of_one() };
    for (reply, blocks) in [(None, 0), (Some(wrong), 0), (Some(other_node), 0), (Some(list_of_one()), 1)] {
        let (namespaces, asked) = (NamespacesScript::Unknown, Arc::default());
        let (to, _liar) = start_liar(Liar { script: Arc::new(script()), asked, namespaces, blocks: reply });
        let one = Plan::new("one", address(), Members::Static(vec![to])).start();
        let number = one.joined("liar", 1);
        let ask = BlocksAsk { namespace: NamespaceDigest([1; 16]), block_bytes: 1, blocks: 5 };
        one.control().ask_blocks(number, ask);
        let lists = one.wait("a list", |seen| {
            let lists = &seen.members.get(&number)?.lists;
            (!lists.is_empty()).then(|| lists.clone())
        });
        assert_eq!((lists[0].0, lists[0].1.len()), (ask, blocks));
    }
}
