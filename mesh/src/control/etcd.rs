//! Registration and membership in etcd.
//!
//! A node is one key, `/pillion/<mesh>/nodes/<node>`, under one lease. The node is alive while it renews the
//! lease. The revision at which the key was created distinguishes one registration from the next. The first
//! sidecar that creates the key has the name until the lease ends, or until a later life of the same node
//! knows that the registered life has ended.
//!
//! A session is one connection to one endpoint. It lists the registrations and watches from that revision on.
//! When it breaks, the last membership stays in use, and the next session lists again at the next endpoint:
//! nothing depends on a history that etcd may have compacted.
//!
//! An observer registers nothing: it has no key and no lease, and only reads.

mod cluster;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Channel, Client, Compare, CompareOp, ConnectOptions, Event, EventType, GetOptions, KeyValue,
    LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchResponse,
    WatchStream,
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::{Instant, Interval, MissedTickBehavior};

pub use self::cluster::Etcd;
use super::back_off::BackOff;
use super::dial::{dial_address, format_causes, run_within};
use super::shared::ControlShared;
use super::{DataAddresses, MEMBERS_MAX};
use crate::membership::{Identity, Registration};
use crate::refusals::Reason;
use crate::transport::{BootId, NodeId};

/// Version of a record. Records of another version are ignored.
const VERSION: u32 = 1;
/// Maximum bytes of a record: three addresses and a number.
const RECORD_BYTES_MAX: usize = 1024;
/// etcd grants no shorter lease, and a longer one if its elections take longer.
const TTL_MIN: Duration = Duration::from_secs(1);
/// Renewals of a lease within its time to live; an observer reads as often.
const RENEWALS: u32 = 3;

/// The value of a node's key, in JSON.
#[derive(Debug, Deserialize, Serialize)]
struct Record {
    version: u32,
    /// In hexadecimal: some readers of JSON have no 64-bit integers.
    boot: String,
    control: String,
    tcp: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rdma: Option<String>,
}

/// A connection to etcd.
struct EtcdSession {
    shared: Arc<ControlShared>,
    client: Client,
    prefix: String,
    /// `None` for an observer.
    lease: Option<i64>,
    ttl: Duration,
    /// True once the key has the record of this life.
    registered: bool,
}

/// The reason for the end of a session.
enum SessionEnd {
    /// The node leaves the mesh.
    Left,
    Broken(String),
}

/// The renewals of a lease, and their answers.
type LeaseRenewal = (LeaseKeeper, LeaseKeepAliveStream);

/// Keeps this node registered and its membership up to date, until `leaving` is notified.
pub(super) async fn register_node(shared: Arc<ControlShared>, etcd: Etcd, leaving: Arc<Notify>) {
    let limits = shared.config.limits;
    let mut lease = None;
    let mut back_off = BackOff::new(&limits, shared.config.boot.0.get());
    for endpoint in etcd.endpoints.iter().cycle() {
        let mut up = None;
        let session = session(&shared, &etcd, endpoint, &mut lease, &mut up, &leaving);
        let why = match session.await {
            SessionEnd::Left => return,
            SessionEnd::Broken(why) => format!("etcd at {endpoint}: {why}"),
        };
        let (pause, is_new) = back_off.pause_after(up.map_or(Duration::ZERO, |since| since.elapsed()), &why);
        if is_new {
            shared.report_note(format!("{why}; the last known members stay in use"));
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = leaving.notified() => return,
        }
    }
}

async fn session(
    shared: &Arc<ControlShared>,
    etcd: &Etcd,
    endpoint: &str,
    lease: &mut Option<i64>,
    up: &mut Option<Instant>,
    leaving: &Notify,
) -> SessionEnd {
    let opened = tokio::select! {
        opened = EtcdSession::open_session(shared, etcd, endpoint, lease) => opened,
        () = leaving.notified() => return SessionEnd::Left,
    };
    let (mut session, renewal, watch) = match opened {
        Ok(opened) => opened,
        Err(why) => return SessionEnd::Broken(why),
    };
    *up = Some(Instant::now());
    let attended = async {
        match renewal {
            Some(renewal) => session.attend(renewal, watch).await,
            None => session.observe(watch).await,
        }
    };
    tokio::select! {
        Err(why) = attended => return SessionEnd::Broken(why),
        () = leaving.notified() => {}
    }
    if let Some(lease) = session.lease {
        // The key ends with its lease, so the other nodes notice at once.
        let _ = session.call("the end of the lease", session.client.lease_client().revoke(lease)).await;
    }
    SessionEnd::Left
}

// === impl EtcdSession ===

impl EtcdSession {
    /// Opens a session: takes a lease, gives all registrations to the membership, and registers this node. An observer does
    /// the second alone.
    async fn open_session(
        shared: &Arc<ControlShared>,
        etcd: &Etcd,
        endpoint: &str,
        known: &mut Option<i64>,
    ) -> Result<(Self, Option<LeaseRenewal>, WatchStream), String> {
        let limits = &shared.config.limits;
        let (address, tls) = etcd.endpoint(endpoint).map_err(|error| error.to_string())?;
        let mut options = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        if let Some((user, password)) = etcd.credentials().map_err(|error| error.to_string())? {
            options = options.with_user(user, password);
        }
        let channel = Channel::Tonic(dial_address(&address, tls, limits.connect, |_| {}).await?);
        let client = run_within(limits.etcd, "signing in", async {
            Client::from_channel(channel, Some(options)).await.map_err(|error| format_causes(&error))
        });
        let prefix = format!("/pillion/{}/nodes/", shared.config.mesh);
        let (client, shared) = (client.await?, Arc::clone(shared));
        let mut session =
            Self { shared, client, prefix, lease: None, ttl: etcd.ttl.max(TTL_MIN), registered: false };
        if session.shared.config.observes() {
            let watch = session.list_nodes().await?;
            return Ok((session, None, watch));
        }
        let renewal = session.take_lease(known).await?;
        let watch = session.list_nodes().await?;
        session.put_key().await?;
        Ok((session, Some(renewal), watch))
    }

    /// Returns the answer of etcd, or an error after `limits.etcd`.
    async fn call<T>(
        &self,
        what: &str,
        call: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, String> {
        let call = async { call.await.map_err(|error| format!("{what}: {}", format_causes(&error))) };
        run_within(self.shared.config.limits.etcd, what, call).await
    }

    /// Keeps the lease of the previous session if it still lives; otherwise takes a new one.
    async fn take_lease(&mut self, known: &mut Option<i64>) -> Result<LeaseRenewal, String> {
        let mut leases = self.client.lease_client();
        if let Some(lease) = *known
            && let Ok(renewal) = self.call("a lease", leases.keep_alive(lease)).await
        {
            self.lease = Some(lease);
            return Ok(renewal);
        }
        let granted = self.call("a lease", leases.grant(self.ttl.as_secs() as i64, None)).await?;
        self.lease = Some(granted.id());
        *known = self.lease;
        self.call("a lease", leases.keep_alive(granted.id())).await
    }

    /// Gives all registrations to the membership, and watches for changes from then on.
    async fn list_nodes(&self) -> Result<WatchStream, String> {
        let options = GetOptions::new().with_prefix().with_limit(MEMBERS_MAX as i64 + 1);
        let mut keys = self.client.kv_client();
        let all = self.call("the list of nodes", keys.get(self.prefix.as_str(), Some(options))).await?;
        let revision = all.header().ok_or("the list of nodes has no revision")?.revision();
        let nodes = all.kvs().iter().filter_map(|key| self.read_registration(key)).collect();
        self.shared.registered(nodes);
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut watches = self.client.watch_client();
        self.call("the watch", watches.watch(self.prefix.as_str(), Some(options))).await
    }

    /// Writes this node's key, unless another life has it. The key of the former life is replaced.
    async fn put_key(&mut self) -> Result<(), String> {
        let mut found = self.claim().await?;
        if let Some(one) = &found
            && let former @ Some(_) = self.shared.config.former
            && self.boot(one) == former
        {
            // The key is deleted, not written over: otherwise it would keep the creation revision of the
            // former life.
            self.replace(one, TxnOp::delete(self.own_key(), None)).await?;
            found = self.claim().await?;
        }
        self.registered = match found {
            None => true,
            // The key is from this life, perhaps under an earlier lease.
            Some(one) if self.boot(&one) == Some(self.shared.config.boot) => {
                self.replace(&one, self.record()).await?
            }
            Some(_) => {
                self.shared.report_note(format!(
                    "this node waits until an earlier registration of '{}' in etcd has ended, up to {} s after a crash; \
                     if this line comes again, two sidecars have that name: give each its own --node-id",
                    self.shared.config.node,
                    self.ttl.as_secs()
                ));
                false
            }
        };
        Ok(())
    }

    /// Creates this node's key. Returns the existing key if there is one.
    async fn claim(&self) -> Result<Option<KeyValue>, String> {
        let key = self.own_key();
        let absent = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
        let first = Txn::new().when([absent]).and_then([self.record()]).or_else([TxnOp::get(key, None)]);
        let mut keys = self.client.kv_client();
        let answer = self.call("the registration", keys.txn(first)).await?;
        match answer.op_responses().into_iter().next() {
            Some(TxnOpResponse::Get(mut found)) => Ok(found.take_kvs().pop()),
            _ => Ok(None),
        }
    }

    /// Applies `by` to this node's key if the key is unchanged since `found`. Returns true if it was.
    async fn replace(&self, found: &KeyValue, by: TxnOp) -> Result<bool, String> {
        let unchanged = Compare::mod_revision(self.own_key(), CompareOp::Equal, found.mod_revision());
        let mut keys = self.client.kv_client();
        let answer = self.call("the registration", keys.txn(Txn::new().when([unchanged]).and_then([by])));
        Ok(answer.await?.succeeded())
    }

    fn own_key(&self) -> String {
        format!("{}{}", self.prefix, self.shared.config.node)
    }

    fn record(&self) -> TxnOp {
        let config = &self.shared.config;
        let served = config.served.as_ref().expect("an observer registers nothing");
        let lease = self.lease.expect("the key is written after the lease");
        let record = Record::to_json(config.boot, served.listen, &served.data);
        TxnOp::put(self.own_key(), record, Some(PutOptions::new().with_lease(lease)))
    }

    /// The life named in a registration.
    fn boot(&self, key: &KeyValue) -> Option<BootId> {
        self.read_registration(key).map(|one| one.identity.boot)
    }

    /// Renews the lease and applies the events of the watch, until something breaks.
    async fn attend(
        &mut self,
        (mut keeper, mut renewed): LeaseRenewal,
        mut watch: WatchStream,
    ) -> Result<std::convert::Infallible, String> {
        let mut renewal = every(self.ttl / RENEWALS);
        let mut retry = every(self.ttl * 2);
        let limit = self.shared.config.limits.etcd;
        let mut due: Option<Instant> = None;
        loop {
            tokio::select! {
                at = renewal.tick() => {
                    run_within(limit, "renewing the lease", async { keeper.keep_alive().await.map_err(|e| format_causes(&e)) }).await?;
                    due.get_or_insert(at + limit);
                }
                () = overdue(due) => return Err("the lease was not renewed in time".into()),
                answer = renewed.message() => {
                    let answer = answer.map_err(|error| format_causes(&error))?.ok_or("the lease's stream ended")?;
                    if answer.ttl() <= 0 {
                        return Err("the lease ran out".into());
                    }
                    due = None;
                }
                told = watch.message() => {
                    if self.take_told(told, &mut watch).await? {
                        // The key ended with its lease or was deleted by hand, or it was the key of another life.
                        self.put_key().await?;
                    }
                }
                _ = retry.tick(), if !self.registered => self.put_key().await?,
            }
        }
    }

    /// Applies the events of the watch for an observer, until something breaks.
    async fn observe(&mut self, mut watch: WatchStream) -> Result<std::convert::Infallible, String> {
        let mut look = every(self.ttl / RENEWALS);
        loop {
            tokio::select! {
                // Nothing else shows that the connection is cut off.
                _ = look.tick() => {
                    let options = GetOptions::new().with_prefix().with_count_only();
                    let mut keys = self.client.kv_client();
                    self.call("the number of nodes", keys.get(self.prefix.as_str(), Some(options))).await?;
                }
                told = watch.message() => {
                    self.take_told(told, &mut watch).await?;
                }
            }
        }
    }

    /// Applies a message of the watch. Returns true if this node's key was deleted.
    async fn take_told(
        &self,
        told: Result<Option<WatchResponse>, etcd_client::Error>,
        watch: &mut WatchStream,
    ) -> Result<bool, String> {
        let told = told.map_err(|error| format_causes(&error))?.ok_or("the watch ended")?;
        if told.canceled() {
            *watch = self.watch_again(&told).await?;
        }
        Ok(self.take_events(&told))
    }

    /// Lists and watches again if etcd has compacted revisions which the watch had yet to read. Fails for any
    /// other cancellation.
    async fn watch_again(&self, told: &WatchResponse) -> Result<WatchStream, String> {
        if told.compact_revision() == 0 {
            return Err(format!("the watch was cancelled: {}", told.cancel_reason()));
        }
        self.list_nodes().await
    }

    /// Applies events of the watch. Returns true if this node's key was deleted.
    fn take_events(&self, told: &WatchResponse) -> bool {
        let own = self.own_key();
        let mut free = false;
        for event in told.events() {
            let Some(key) = event.kv() else { continue };
            self.happened(event, key);
            if key.key() == own.as_bytes() {
                free = event.event_type() == EventType::Delete;
            }
        }
        free
    }

    fn happened(&self, event: &Event, key: &KeyValue) {
        match event.event_type() {
            EventType::Put => {
                if let Some(one) = self.read_registration(key) {
                    self.shared.put_registration(one);
                }
            }
            EventType::Delete => {
                if let Some(node) = self.node(key) {
                    self.shared.delete(&node, key.mod_revision());
                }
            }
        }
    }

    /// Reads a registration. Returns `None` for a key or a record that is invalid; an invalid record is
    /// counted and logged.
    fn read_registration(&self, key: &KeyValue) -> Option<Registration> {
        let node = self.node(key)?;
        match Record::from_json(key.value()) {
            Ok((boot, control, data)) => {
                let identity = Identity { node, boot, data };
                Some(Registration { identity, control, created: key.create_revision() })
            }
            Err(why) => {
                self.shared.count_refusal(Reason::Malformed);
                self.shared.note_rarely(format!("the registration of {node} in etcd is ignored: {why}"));
                None
            }
        }
    }

    fn node(&self, key: &KeyValue) -> Option<NodeId> {
        let name = key.key().strip_prefix(self.prefix.as_bytes())?;
        NodeId::new(String::from_utf8(name.to_vec()).ok()?).ok()
    }
}

/// An interval whose first tick comes after one `period`. Missed ticks are not made up.
fn every(period: Duration) -> Interval {
    let mut interval = tokio::time::interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval.reset();
    interval
}

async fn overdue(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

// === impl Record ===

impl Record {
    fn to_json(boot: BootId, control: std::net::SocketAddr, data: &DataAddresses) -> String {
        let (boot, control, tcp) = (format!("{:016x}", boot.0), control.to_string(), data.tcp.to_string());
        let record =
            Self { version: VERSION, boot, control, tcp, rdma: data.rdma.map(|rdma| rdma.to_string()) };
        serde_json::to_string(&record).expect("strings and a number")
    }

    fn from_json(bytes: &[u8]) -> Result<(BootId, std::net::SocketAddr, DataAddresses), String> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(format!("it has {} bytes, of at most {RECORD_BYTES_MAX}", bytes.len()));
        }
        let record: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if record.version != VERSION {
            return Err(format!(
                "its version is {}, not {VERSION}: run the same release on every node",
                record.version
            ));
        }
        let boot = u64::from_str_radix(&record.boot, 16).ok().and_then(NonZeroU64::new).ok_or("no life")?;
        let address = |text: &str| text.parse().map_err(|_| "it has an invalid address");
        let rdma = record.rdma.as_deref().map(address).transpose()?;
        let data = DataAddresses { tcp: address(&record.tcp)?, rdma };
        Ok((BootId(boot), address(&record.control)?, data))
    }
}
