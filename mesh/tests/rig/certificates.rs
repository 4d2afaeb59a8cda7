//! Certificates for a test, and their files.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use mesh::tls::Tls;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

/// The name in every node's certificate.
pub(crate) const NAME: &str = "pillion.mesh";

pub(crate) struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A folder with a node's files, removed at the end.
pub(crate) struct Folder(pub(crate) PathBuf);

// === impl Authority ===

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "mesh");
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate with its end in this year, and its key.
    pub(crate) fn issue(&self, name: &str, year: i32) -> (String, String) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

// === impl Folder ===

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("mesh-tls-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A node's files: certificates of `by`, and trust in `ca`.
    pub(crate) fn with(by: &Authority, ca: &Authority, name: &str, year: i32) -> Self {
        let folder = Self::new();
        folder.write(by, ca, name, year);
        folder
    }

    /// Replaces each file atomically, as a secret is replaced.
    pub(crate) fn write(&self, by: &Authority, ca: &Authority, name: &str, year: i32) {
        let (certificate, key) = by.issue(name, year);
        for (file, text) in [("tls.crt", &certificate), ("tls.key", &key), ("ca.crt", &ca.pem)] {
            let new = self.0.join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(new, self.0.join(file)).unwrap();
        }
    }

    pub(crate) fn tls(&self) -> Tls {
        let file = |name: &str| self.0.join(name);
        Tls { certificate: file("tls.crt"), key: file("tls.key"), ca: file("ca.crt"), name: NAME.into() }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
