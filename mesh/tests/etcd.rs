//! Membership in a real etcd, started and ended by each test.

mod rig;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::{Client, CompactionOptions, PermissionType};
use mesh::control::{Control, ControlLimits, Etcd, Members, Parting};
use rig::certificates::{Authority, Folder};
use rig::crew::{Crew, Plan, added, address, patient};
use rig::proxy::{Proxy, Trouble, Troubles};
use rig::{WATCHDOG, now};

/// The shortest granted by etcd with these settings.
const TTL: Duration = Duration::from_secs(2);
/// Longer than any test: a registration does not end by itself.
const LONG_TTL: Duration = Duration::from_secs(600);

/// A cluster of one.
struct Server {
    child: Option<Child>,
    folder: Folder,
    address: SocketAddr,
    tls: Option<Folder>,
}

// === impl Server ===

impl Server {
    fn start() -> Self {
        Self::with(address(), None)
    }

    /// A server with a certificate in `tls`; it requires certificates of the same authority.
    fn with(address: SocketAddr, tls: Option<Folder>) -> Self {
        let mut server = Self { child: None, folder: Folder::new(), address, tls };
        server.run();
        server
    }

    fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    fn run(&mut self) {
        let peers = format!("http://{}", SocketAddr::new(self.address.ip(), self.address.port() + 1));
        let mut command = Command::new("etcd");
        command
            .args(["--data-dir".into(), self.folder.0.join("data")])
            .args(["--listen-client-urls", &self.url(), "--advertise-client-urls", &self.url()])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}")])
            .args(["--heartbeat-interval", "10", "--election-timeout", "100", "--log-level", "error"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(tls) = &self.tls {
            let files = tls.tls();
            command.arg("--cert-file").arg(files.certificate).arg("--key-file").arg(files.key);
            command.arg("--trusted-ca-file").arg(files.ca);
            command.arg("--client-cert-auth");
        }
        let child = command.spawn().expect("etcd is installed by scripts/setup tests");
        self.child = Some(child);
        let end = now() + WATCHDOG;
        while std::net::TcpStream::connect(self.address).is_err() {
            assert!(now() < end, "etcd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Runs an operator's action on etcd.
    fn operate<T>(&self, work: impl AsyncFnOnce(Client) -> Result<T, etcd_client::Error>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let end = now() + WATCHDOG;
            // It listens before it serves.
            let client = loop {
                let mut client = Client::connect([self.url()], None).await.unwrap();
                match client.get("ready", None).await {
                    Ok(_) => break client,
                    Err(error) => assert!(now() < end, "{error}"),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            work(client).await.unwrap()
        })
    }

    fn etcd(&self, ttl: Duration) -> Etcd {
        Etcd { endpoints: vec![self.url()], ca: None, certificate: None, user: None, ttl }
    }

    fn plan(&self, name: &'static str, ttl: Duration) -> Plan {
        Plan::new(name, address(), Members::Etcd(self.etcd(ttl)))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A node whose path to etcd goes through this proxy.
fn behind(proxy: &Proxy, plan: Plan, ttl: Duration) -> Plan {
    let endpoints = vec![format!("http://{}", proxy.address)];
    Plan { members: Members::Etcd(Etcd { endpoints, ca: None, certificate: None, user: None, ttl }), ..plan }
}

/// Stops all traffic, on existing connections and on new ones.
fn cut_off(proxy: &Proxy) {
    proxy.trouble(Troubles { up: vec![Trouble::Stall(0)], down: vec![Trouble::Stall(0)] });
    proxy.cut();
}

fn heal(proxy: &Proxy) {
    proxy.trouble(Troubles::default());
    proxy.cut();
}

/// Limits under which a node soon gives up on an etcd without answers.
fn brisk() -> ControlLimits {
    ControlLimits { connect: Duration::from_secs(1), etcd: Duration::from_secs(1), ..patient() }
}

fn sees(node: &Crew, other: &Crew, life: u64, keys: std::ops::Range<u64>) -> mesh::transport::PeerNumber {
    let number = node.joined(other.name.as_str(), life);
    node.keeps(number, keys, 900_000..901_000);
    number
}

#[test]
fn nodes_that_are_registered_follow_each_other_and_who_ends_is_left_at_once() {
    let server = Server::start();
    let one = server.plan("one", LONG_TTL).start();
    one.publish(added(0..10));
    let mut two = server.plan("two", LONG_TTL).start();
    two.publish(added(100..110));
    sees(&two, &one, 1, 0..10);
    let number = sees(&one, &two, 1, 100..110);
    one.seen(|seen| {
        let member = &seen.members[&number];
        assert_eq!(member.peer.address.port(), two.control().listen_address().unwrap().port() + 1);
        assert_eq!(
            member.rdma.map(|rdma| rdma.port()),
            Some(two.control().listen_address().unwrap().port() + 2)
        );
    });
    // Nodes of another mesh are no members.
    let other = Plan { mesh: "other", ..server.plan("other", LONG_TTL) }.start();
    let keys = server.operate(async |mut client| {
        let all = etcd_client::GetOptions::new().with_prefix();
        loop {
            let keys = client.get("/pillion/other/", Some(all.clone())).await?;
            if keys.count() > 0 {
                return Ok(keys);
            }
        }
    });
    let record: serde_json::Value = serde_json::from_slice(keys.kvs()[0].value()).unwrap();
    assert_eq!(record["control"], other.control().listen_address().unwrap().to_string());
    assert_eq!(record["boot"], "0000000000000001");
    two.stop();
    assert_eq!(one.left(number), Parting::Unregistered);
    one.seen(|seen| assert!(seen.members.is_empty()));
}

/// Keys of a mesh, and leases.
async fn keys_and_leases(
    client: &mut Client,
    mesh: &str,
) -> Result<(Vec<String>, usize), etcd_client::Error> {
    let options = etcd_client::GetOptions::new().with_prefix().with_keys_only();
    let keys = client.get(format!("/pillion/{mesh}/"), Some(options)).await?;
    let keys = keys.kvs().iter().map(|key| key.key_str().unwrap().to_owned()).collect();
    Ok((keys, client.leases().await?.leases().len()))
}

#[test]
fn an_observer_finds_members_in_etcd_and_registers_nothing() {
    let server = Server::start();
    let one = server.plan("one", LONG_TTL).start();
    one.publish(added(0..10));
    let proxy = Proxy::start(server.address, Troubles::default());
    let observing = Plan { observes: true, limits: brisk(), ..server.plan("router", TTL) };
    let router = behind(&proxy, observing, TTL).start();
    let number = sees(&router, &one, 1, 0..10);
    assert_eq!(router.ask().len(), 1, "the member answers it");
    let mut two = server.plan("two", LONG_TTL).start();
    two.publish(added(100..110));
    let of_two = sees(&router, &two, 1, 100..110);
    let found = server.operate(async |mut client| keys_and_leases(&mut client, "test").await);
    assert_eq!(found, (vec!["/pillion/test/nodes/one".into(), "/pillion/test/nodes/two".into()], 2));
    for member in [&one, &two] {
        member.seen(|seen| assert_eq!(seen.members.len(), 1, "the router is no member"));
    }
    two.stop();
    assert_eq!(router.left(of_two), Parting::Unregistered);
    // The observer notices the silence of etcd, keeps its members, and then finds new ones.
    cut_off(&proxy);
    router.noted("the last known members stay in use");
    let three = server.plan("three", LONG_TTL).start();
    one.publish(added(10..20));
    router.keeps(number, 10..20, 900_000..901_000);
    heal(&proxy);
    router.joined(three.name.as_str(), 1);
    router.seen(|seen| assert!(seen.members.contains_key(&number)));
}

#[test]
fn a_node_that_does_not_renew_its_lease_is_fenced_and_comes_back_as_another_member() {
    let server = Server::start();
    let one = server.plan("one", LONG_TTL).start();
    let proxy = Proxy::start(server.address, Troubles::default());
    let two = Plan { limits: brisk(), ..behind(&proxy, server.plan("two", TTL), TTL) }.start();
    two.publish(added(100..110));
    let before = sees(&one, &two, 1, 100..110);
    let of_one = two.joined("one", 1);
    cut_off(&proxy);
    assert_eq!(one.left(before), Parting::Unregistered);
    // The node keeps its last known members in use.
    two.noted("the last known members stay in use");
    one.publish(added(0..10));
    two.keeps(of_one, 0..10, 900_000..901_000);
    heal(&proxy);
    let after = sees(&one, &two, 1, 100..110);
    assert_ne!(before, after);
    two.seen(|seen| assert!(seen.left.is_empty() && seen.members.contains_key(&of_one)));
}

#[test]
fn a_node_that_crashed_joins_in_its_next_life_when_its_lease_has_ended() {
    let server = Server::start();
    let one = server.plan("one", LONG_TTL).start();
    let proxy = Proxy::start(server.address, Troubles::default());
    let plan = server.plan("two", TTL);
    let mut two = Plan { limits: brisk(), ..behind(&proxy, plan.clone(), TTL) }.start();
    let before = one.joined("two", 1);
    // It cannot end its registration.
    cut_off(&proxy);
    two.stop();
    let two = Plan { life: 2, ..plan }.start();
    two.publish(added(100..110));
    sees(&one, &two, 2, 100..110);
    assert_eq!(one.left(before), Parting::Unregistered);
}

#[test]
fn a_node_that_knows_that_its_life_before_has_ended_takes_its_place_at_once() {
    let server = Server::start();
    let one = server.plan("one", LONG_TTL).start();
    let proxy = Proxy::start(server.address, Troubles::default());
    let plan = server.plan("two", LONG_TTL);
    let mut two = Plan { limits: brisk(), ..behind(&proxy, plan.clone(), LONG_TTL) }.start();
    let before = one.joined("two", 1);
    let created = |server: &Server| {
        let key = server.operate(async |mut client| client.get("/pillion/test/nodes/two", None).await);
        key.kvs()[0].create_revision()
    };
    let token = created(&server);
    cut_off(&proxy);
    two.stop();
    // The lease outlives the test.
    let mut two = Plan { life: 2, former: Some(1), ..plan }.start();
    two.publish(added(100..110));
    let after = sees(&one, &two, 2, 100..110);
    assert_eq!(one.left(before), Parting::Unregistered);
    assert!(created(&server) > token, "another registration");
    two.seen(|seen| assert!(seen.notes.is_empty(), "{:?}", seen.notes));
    two.stop();
    assert_eq!(one.left(after), Parting::Unregistered);
}

#[test]
fn of_two_nodes_with_one_name_the_first_has_it_and_the_other_is_told() {
    let server = Server::start();
    let three = server.plan("three", LONG_TTL).start();
    let mut first = server.plan("one", LONG_TTL).start();
    let number = three.joined("one", 1);
    // The end of another life is no reason.
    let second = Plan { life: 2, former: Some(3), ..server.plan("one", TTL) }.start();
    second.noted("two sidecars have that name: give each its own --node-id");
    // It knows the others nevertheless, and registers when the first ends.
    second.joined("three", 1);
    three.seen(|seen| assert!(seen.left.is_empty() && seen.members.contains_key(&number)));
    first.stop();
    three.joined("one", 2);
    assert_eq!(three.left(number), Parting::Unregistered);
}

#[test]
fn without_etcd_the_last_membership_serves_on_and_then_heals() {
    let mut server = Server::start();
    let ttl = Duration::from_secs(30);
    let plan = |name| Plan { limits: brisk(), ..server.plan(name, ttl) };
    let (plans, late) = ([plan("one"), plan("two")], plan("three"));
    let [one, mut two] = plans.clone().map(|plan| plan.start());
    let number = one.joined("two", 1);
    two.joined("one", 1);
    server.kill();
    one.noted("the last known members stay in use");
    two.publish(added(100..110));
    one.keeps(number, 100..110, 900_000..901_000);
    // A node that starts meanwhile waits for etcd.
    let three = late.start();
    three.noted("etcd at http");
    server.run();
    three.joined("one", 1);
    let of_three = one.joined("three", 1);
    one.seen(|seen| assert!(seen.left.is_empty()));
    // All watch again, under their previous leases.
    two.joined("three", 1);
    two.stop();
    assert_eq!(one.left(number), Parting::Unregistered);
    drop(three);
    assert_eq!(one.left(of_three), Parting::Unregistered);
}

#[test]
fn what_was_compacted_while_a_node_was_away_is_not_missed() {
    let server = Server::start();
    let proxy = Proxy::start(server.address, Troubles::default());
    let plan = server.plan("one", LONG_TTL);
    let one = Plan { limits: brisk(), ..behind(&proxy, plan, LONG_TTL) }.start();
    let (stays, mut goes) = (server.plan("stays", LONG_TTL).start(), server.plan("goes", LONG_TTL).start());
    let (kept, lost) = (one.joined("stays", 1), one.joined("goes", 1));
    cut_off(&proxy);
    one.noted("the last known members stay in use");
    goes.stop();
    let comes = server.plan("comes", LONG_TTL).start();
    stays.joined("comes", 1);
    server.operate(async |mut client| {
        let mut revision = 0;
        for _ in 0..100 {
            revision = client.put("elsewhere", "", None).await?.header().unwrap().revision();
        }
        client.compact(revision, Some(CompactionOptions::new().with_physical())).await
    });
    heal(&proxy);
    one.joined(comes.name.as_str(), 1);
    assert_eq!(one.left(lost), Parting::Unregistered);
    one.seen(|seen| assert!(seen.members.contains_key(&kept) && seen.left.len() == 1));
}

#[test]
fn what_was_compacted_between_list_and_watch_is_not_missed() {
    let server = Server::start();
    let stays = server.plan("stays", LONG_TTL).start();
    // All requests of the node are late, so changes after its list happen before its watch.
    let proxy = Proxy::start(server.address, Troubles::up(Trouble::Delay(Duration::from_millis(600))));
    let one = behind(&proxy, server.plan("one", LONG_TTL), LONG_TTL).start();
    one.joined("stays", 1);
    let mut comes = server.plan("comes", LONG_TTL).start();
    stays.joined("comes", 1);
    server.operate(async |mut client| {
        let revision = client.put("elsewhere", "", None).await?.header().unwrap().revision();
        client.compact(revision, None).await
    });
    let number = one.joined("comes", 1);
    comes.stop();
    assert_eq!(one.left(number), Parting::Unregistered);
    stays.joined("one", 1);
}

#[test]
fn a_key_that_an_operator_deletes_is_written_again() {
    let server = Server::start();
    let (one, two) = (server.plan("one", LONG_TTL).start(), server.plan("two", LONG_TTL).start());
    two.publish(added(100..110));
    let before = sees(&one, &two, 1, 100..110);
    server.operate(async |mut client| client.delete("/pillion/test/nodes/two", None).await);
    assert_eq!(one.left(before), Parting::Unregistered);
    sees(&one, &two, 1, 100..110);
}

#[test]
fn records_that_are_none_are_passed_over() {
    let server = Server::start();
    let one = server.plan("one", LONG_TTL).start();
    let long = format!(
        r#"{{"version":1,"boot":"1","control":"127.0.0.1:1","tcp":"127.0.0.1:2","rdma":"{}"}}"#,
        "x".repeat(9000)
    );
    let bad = [
        "",
        "nonsense",
        "{}",
        r#"{"version":2,"boot":"1","control":"127.0.0.1:1","tcp":"127.0.0.1:2"}"#,
        r#"{"version":1,"boot":"0","control":"127.0.0.1:1","tcp":"127.0.0.1:2"}"#,
        r#"{"version":1,"boot":"1","control":"nowhere","tcp":"127.0.0.1:2"}"#,
        r#"{"version":1,"boot":"1","control":"127.0.0.1:1","tcp":"127.0.0.1:2","rdma":"nic0"}"#,
        &long,
    ];
    server.operate(async |mut client| {
        for (number, record) in bad.iter().enumerate() {
            client.put(format!("/pillion/test/nodes/bad{number}"), *record, None).await?;
        }
        client.put("/pillion/test/nodes/", "no name", None).await?;
        client.put("/pillion/test/nodes/\u{ff}", "a strange name", None).await
    });
    one.noted("is ignored");
    let two = server.plan("two", LONG_TTL).start();
    two.publish(added(0..10));
    sees(&one, &two, 1, 0..10);
    one.seen(|seen| assert_eq!(seen.members.len(), 1));
    two.seen(|seen| assert!(seen.members.len() <= 1));
}

#[test]
fn a_user_with_a_password_is_signed_in() {
    let server = Server::start();
    server.operate(async |mut client| {
        client.user_add("root", "secret", None).await?;
        client.user_grant_role("root", "root").await?;
        client.role_add("mesh").await?;
        let nodes =
            etcd_client::Permission::new(PermissionType::Readwrite, "/pillion/test/nodes/").with_prefix();
        client.role_grant_permission("mesh", nodes).await?;
        client.user_add("sidecar", "right", None).await?;
        client.user_grant_role("sidecar", "mesh").await?;
        // A router only reads.
        client.role_add("reader").await?;
        let reads = etcd_client::Permission::read("/pillion/test/nodes/").with_prefix();
        client.role_grant_permission("reader", reads).await?;
        client.user_add("router", "right", None).await?;
        client.user_grant_role("router", "reader").await?;
        client.auth_enable().await
    });
    let folder = Folder::new();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let signed = |user: &str, name, password: PathBuf| {
        let user = Some((user.to_owned(), password));
        let members = Members::Etcd(Etcd { user, ..server.etcd(LONG_TTL) });
        Plan { members, ..server.plan(name, LONG_TTL) }
    };
    let plan = |name, password| signed("sidecar", name, password);
    let one = plan("one", file("right", "right\n")).start();
    let router = Plan { observes: true, ..signed("router", "router", file("reads", "right")) }.start();
    router.joined("one", 1);
    let two = plan("two", file("wrong", "wrong")).start();
    two.noted("authentication failed");
    let nobody = server.plan("nobody", LONG_TTL).start();
    nobody.noted("user name is empty");
    // The file is read at each attempt.
    file("wrong", "right");
    one.joined("two", 1);
    one.seen(|seen| assert_eq!(seen.members.len(), 1));
    let Err(error) = Control::start(plan("three", folder.0.join("none")).config(), drop) else { panic!() };
    assert!(error.to_string().contains("pass a file with etcd's password"), "{error}");
}

#[test]
fn mutual_tls_to_etcd() {
    let (ca, strange) = (Authority::new(), Authority::new());
    let at = address();
    let server = Server::with(at, Some(Folder::with(&ca, &ca, &at.ip().to_string(), 2099)));
    let plan = |name, files: Option<&Folder>, ca: Option<PathBuf>| {
        let certificate = files.map(|files| (files.tls().certificate, files.tls().key));
        let members = Members::Etcd(Etcd { ca, certificate, ..server.etcd(LONG_TTL) });
        Plan { members, ..server.plan(name, LONG_TTL) }
    };
    let (good, bad) = (Folder::with(&ca, &ca, "node", 2099), Folder::with(&strange, &strange, "node", 2099));
    let one = plan("one", Some(&good), Some(good.tls().ca)).start();
    let two = plan("two", Some(&good), Some(good.tls().ca)).start();
    one.joined("two", 1);
    two.joined("one", 1);
    for refused in [
        plan("three", None, Some(good.tls().ca)),
        plan("four", Some(&bad), Some(good.tls().ca)),
        plan("five", Some(&good), Some(bad.tls().ca)),
    ] {
        let node = refused.start();
        node.noted("etcd at https");
        node.seen(|seen| assert!(seen.members.is_empty()));
    }
    one.seen(|seen| assert_eq!(seen.members.len(), 1));
    let Err(error) = Control::start(plan("six", Some(&good), None).config(), drop) else { panic!() };
    assert!(error.to_string().contains("pass --etcd-ca"), "{error}");
}

#[test]
fn an_endpoint_that_is_dead_is_passed_over_and_none_is_refused() {
    let server = Server::start();
    let endpoints = |all: Vec<String>| Members::Etcd(Etcd { endpoints: all, ..server.etcd(LONG_TTL) });
    let dead = format!("http://{}", address());
    let one = Plan { members: endpoints(vec![dead, server.url()]), ..server.plan("one", LONG_TTL) }.start();
    let two = server.plan("two", LONG_TTL).start();
    one.joined("two", 1);
    two.joined("one", 1);
    for (wrong, remedy) in [
        (vec![], "at least one"),
        (vec!["host:2379".into()], "pass http://host:port"),
        (vec!["ftp://host:2379".into()], "pass http://host:port"),
        (vec!["http://host".into()], "pass http://host:port"),
    ] {
        let plan = Plan { members: endpoints(wrong), ..server.plan("three", LONG_TTL) };
        let Err(error) = Control::start(plan.config(), drop) else { panic!("{remedy}") };
        assert!(error.to_string().contains(remedy), "{error}");
    }
}
