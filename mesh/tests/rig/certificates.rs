//! Certificates for a test, and their files.

#[path = "authority.rs"]
mod authority;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use mesh::tls::Tls;

pub(crate) use self::authority::Authority;

/// The name in every node's certificate.
pub(crate) const NAME: &str = "pillion.mesh";

/// A folder with a node's files, removed at the end.
pub(crate) struct Folder(pub(crate) PathBuf);

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
