//! Files of an earlier life, unusable in this one: they are given up whole, and start empty.

use std::fmt;

shm_protocol::named! {
    /// The cause of giving up a pool file or a log.
    pub enum Cause {
        /// Another release made its layout, and this release does not read it.
        Version = "version",
        /// It was made for other sizes.
        Sizes = "sizes",
        /// It was made before this machine started.
        Boot = "boot",
        /// The life that wrote it ended before it was whole, or memory was taken from it since.
        Unfinished = "unfinished",
        /// No sidecar writes such a header.
        Damaged = "damaged",
    }
}

/// A file given up, with a text for operators.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GivenUp {
    pub cause: Cause,
    text: String,
}

// === impl GivenUp ===

impl GivenUp {
    pub(crate) fn new(cause: Cause, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
