//! What an earlier life left in a file that this one cannot go on with: it is given up whole, and the file starts empty.

use std::fmt;

shm_protocol::named! {
    /// Why a pool file or a log is given up.
    pub enum Cause {
        /// Its layout is another release's, and this release does not read it.
        Version = "version",
        /// It was made for other sizes.
        Sizes = "sizes",
        /// It was made before this machine started.
        Boot = "boot",
        /// The life that wrote it ended before it was whole, or memory was taken from it since.
        Unfinished = "unfinished",
        /// Its header is not what a sidecar writes.
        Damaged = "damaged",
    }
}

/// A file that is given up, and what an operator should know of it.
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
