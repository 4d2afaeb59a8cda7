//! Quotas, as shown by the metrics and the control socket. The data thread writes atomics; other threads read
//! them.

use std::sync::Arc;

use prometheus::{IntGauge, Registry};
use serde::Serialize;
use shm_protocol::key::NamespaceDigest;

use crate::config::quotas::{self, NamespaceQuota};
use crate::pages::metrics::figures::{register_gauges, show_gauge};

/// The bytes used of every quota; all clones share them.
#[derive(Clone, Debug, Default)]
pub struct Levels {
    quotas: Arc<[NamespaceQuota]>,
    used: Arc<[IntGauge]>,
}

/// A quota, as shown by the control socket.
#[derive(Debug, Serialize)]
pub struct QuotaLevel {
    /// Its name on the command line; other namespaces may share it.
    pub name: String,
    /// Its limit in bytes.
    pub bytes: u64,
    /// Bytes in use.
    pub used_bytes: i64,
}

// === impl Levels ===

impl Levels {
    /// Registers two gauges for each quota in `registry`.
    pub fn new(registry: &Registry, quotas: &[NamespaceQuota]) -> Result<Self, prometheus::Error> {
        if quotas.is_empty() {
            return Ok(Self::default());
        }
        let gauges = |name, help| register_gauges(registry, name, help, &["namespace"]);
        let sizes = gauges("quota_bytes", "Bytes that blocks of the namespace may take.")?;
        let used = gauges("quota_used_bytes", "Bytes that blocks of the namespace take now.")?;
        let used = quotas.iter().map(|quota| {
            let name = quota.whose.to_string();
            show_gauge(&sizes.with_label_values(&[&name]), quota.size.as_bytes());
            used.with_label_values(&[&name])
        });
        Ok(Self { used: used.collect(), quotas: quotas.into() })
    }

    /// Publishes the bytes used of each quota, in order.
    pub fn publish_levels(&self, used: impl Iterator<Item = u64>) {
        self.used.iter().zip(used).for_each(|(gauge, used)| show_gauge(gauge, used));
    }

    /// The quota of a namespace, if it has one.
    pub fn of_namespace(&self, namespace: NamespaceDigest) -> Option<QuotaLevel> {
        let at = quotas::find_quota(&self.quotas, namespace)?;
        let quota = &self.quotas[at];
        let used_bytes = self.used[at].get();
        Some(QuotaLevel { name: quota.whose.to_string(), bytes: quota.size.as_bytes(), used_bytes })
    }
}
