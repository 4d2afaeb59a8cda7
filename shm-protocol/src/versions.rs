//! The versions of a format in a release, and the one rule by which two releases agree on a version.
//!
//! The handshake, the pool's header and the superblock of an SSD each state their [`Versions`] and have their
//! own numbers.

use std::fmt;

/// This release of Pillion. People read it; no decision depends on it.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Bytes of a release's name in a file, padded with zeros.
pub const RELEASE_BYTES: usize = 32;
/// Bytes of the longest release's name in a record.
pub const RELEASE_BYTES_MAX: usize = 64;
/// The first version of each file format with `oldest` and a release.
const STATED_SINCE: u32 = 2;

const _: () = assert!(!RELEASE.is_empty() && RELEASE.len() <= RELEASE_BYTES);

/// The versions of one format: those a peer speaks, or those whose readers read a file correctly.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Versions {
    /// The newest version of a peer; the version of a file.
    pub version: u32,
    /// The oldest version of a peer, or the oldest whose reader reads the file correctly.
    pub oldest: u32,
    /// The release with these versions; empty if not stated.
    pub release: String,
}

// === impl Versions ===

impl Versions {
    /// Returns this release's versions of a format.
    pub fn own(version: u32, oldest: u32) -> Self {
        Self { version, oldest, release: RELEASE.into() }
    }

    /// Reads the versions of a file: the words of its version and of the oldest one, and its release's name.
    /// The first version of a file format has no place for the latter two: other bytes lie there.
    pub fn of_file(version: u64, oldest: u64, release: &[u8; RELEASE_BYTES]) -> Self {
        // A word with no valid version agrees with no version.
        let version = u32::try_from(version).unwrap_or(0);
        let oldest = u32::try_from(oldest).unwrap_or(u32::MAX);
        if version < STATED_SINCE {
            return Self { version, oldest: version, release: String::new() };
        }
        let name = release.split(|byte| *byte == 0).next().unwrap_or_default();
        let release = str::from_utf8(name).unwrap_or_default().into();
        Self { version, oldest, release }
    }

    /// Returns the name of the release for a file.
    pub fn release_bytes(&self) -> [u8; RELEASE_BYTES] {
        let name = self.release.as_bytes();
        std::array::from_fn(|index| name.get(index).copied().unwrap_or(0))
    }

    /// Returns the newest common version, if there is one. A file is readable if there is one: its writer's
    /// `oldest` is then at most this release's version, and its version at least this release's `oldest`.
    pub fn common(&self, other: &Self) -> Option<u32> {
        let newest = self.version.min(other.version);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, oldest, release } = self;
        match oldest {
            oldest if oldest == version => write!(f, "version {version}")?,
            oldest => write!(f, "versions {oldest} to {version}")?,
        }
        match release.as_str() {
            "" => write!(f, " (release not stated)"),
            // The text comes from a peer: none of its control characters may reach a terminal.
            release => write!(f, " (release {})", release.escape_debug()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(oldest: u32, version: u32) -> Versions {
        Versions { version, oldest, release: "r".into() }
    }

    #[test]
    fn two_releases_agree_on_the_newest_version_that_both_know() {
        for (one, other, agreed) in [
            ((2, 2), (2, 2), Some(2)),
            ((2, 3), (2, 2), Some(2)),
            ((2, 5), (3, 4), Some(4)),
            ((2, 3), (3, 4), Some(3)),
            ((2, 2), (1, 1), None),
            ((2, 2), (3, 4), None),
            // The range is empty, so it agrees with no range.
            ((3, 2), (2, 3), None),
        ] {
            let (one, other) = (versions(one.0, one.1), versions(other.0, other.1));
            assert_eq!(one.common(&other), agreed, "{one} and {other}");
            assert_eq!(other.common(&one), agreed, "{other} and {one}");
        }
    }

    #[test]
    fn what_a_file_states_comes_back() {
        let own = Versions::own(7, 5);
        assert_eq!(Versions::of_file(7, 5, &own.release_bytes()), own);
        let long = Versions { release: "r".repeat(RELEASE_BYTES), ..own };
        assert_eq!(Versions::of_file(7, 5, &long.release_bytes()), long);
        let unreadable = Versions::of_file(7, 5, &[0xff; RELEASE_BYTES]);
        assert_eq!(unreadable.to_string(), "versions 5 to 7 (release not stated)");
    }

    #[test]
    fn the_first_version_stated_nothing_else() {
        let first = Versions::of_file(1, 2, &Versions::own(2, 2).release_bytes());
        assert_eq!(first.to_string(), "version 1 (release not stated)");
        for wide in [1 << 32, u64::MAX] {
            for (version, oldest) in [(wide, 1), (2, wide)] {
                assert_eq!(
                    Versions::of_file(version, oldest, &[0; RELEASE_BYTES]).common(&versions(1, 9)),
                    None
                );
            }
        }
    }

    #[test]
    fn a_release_that_a_peer_states_cannot_steer_a_terminal() {
        let hostile = Versions { release: "\x1b[2J".into(), ..versions(1, 1) };
        assert_eq!(hostile.to_string(), "version 1 (release \\u{1b}[2J)");
    }
}
