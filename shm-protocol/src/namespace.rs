//! The namespace: a digest of everything that makes the bytes of two engines interchangeable.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::key::NamespaceDigest;

/// The namespace of an engine: the first 16 bytes of SHA-256 over the CBOR map of its facts, sorted by name.
pub fn digest(facts: &BTreeMap<String, String>) -> NamespaceDigest {
    truncate(Sha256::digest(crate::handshake::encode(facts)).as_slice())
}

/// The next generation of a namespace, after its cache was reset: a digest of the old one and 16 random bytes.
pub fn salted(namespace: NamespaceDigest, salt: [u8; 16]) -> NamespaceDigest {
    let mut hasher = Sha256::new();
    hasher.update(namespace.0);
    hasher.update(salt);
    truncate(hasher.finalize().as_slice())
}

fn truncate(digest: &[u8]) -> NamespaceDigest {
    NamespaceDigest(digest[..16].try_into().expect("SHA-256 has 32 bytes"))
}
