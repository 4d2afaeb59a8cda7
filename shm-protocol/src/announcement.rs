//! Announcements to an engine of the blocks it could find: all of them between BEGIN and END, then each
//! change.

use crate::key::BlockHash;
use crate::message::{DecodeError, Slot};
use crate::source::Source;

/// A block of the engine's namespace, at one of its places.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Located {
    /// The place of the block.
    pub medium: Source,
    /// Number of its bundle of cache groups.
    pub group: u32,
    /// The block's key, as the engine made it.
    pub hash: BlockHash,
}

/// One slot of the announcement ring.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Announcement {
    /// The block can be found at this place now.
    Stored(Located),
    /// The block can no longer be found at this place.
    Removed(Located),
    /// Earlier announcements may be wrong: all blocks follow.
    Begin,
    /// Blocks not announced since the last BEGIN are not kept.
    End,
}

const STORED: u8 = 1;
const REMOVED: u8 = 2;
const BEGIN: u8 = 3;
const END: u8 = 4;

// === impl Announcement ===

impl Announcement {
    /// Returns the words of the slot: `kind u8, medium u8, zero u16, group u32, hash`, the rest zero.
    pub fn encode(&self) -> Slot {
        let (kind, located) = match self {
            Self::Stored(located) => (STORED, Some(located)),
            Self::Removed(located) => (REMOVED, Some(located)),
            Self::Begin => (BEGIN, None),
            Self::End => (END, None),
        };
        let Some(Located { medium, group, hash }) = located else {
            return [u64::from(kind), 0, 0, 0, 0, 0, 0, 0];
        };
        let head = u64::from(kind) | u64::from(*medium as u8) << 8 | u64::from(*group) << 32;
        let [a, b, c, d] = hash.words();
        [head, a, b, c, d, 0, 0, 0]
    }

    /// Reads a slot already copied out of shared memory. Fails on an unknown kind or medium.
    pub fn decode(slot: &Slot) -> Result<Self, DecodeError> {
        let [head, a, b, c, d, ..] = *slot;
        let [kind, medium, ..] = head.to_le_bytes();
        let located = || {
            let known = Source::ALL.get(usize::from(medium)).copied();
            let medium = known.ok_or(DecodeError { what: "medium", value: medium })?;
            Ok(Located { medium, group: (head >> 32) as u32, hash: BlockHash::from_words([a, b, c, d]) })
        };
        match kind {
            STORED => located().map(Self::Stored),
            REMOVED => located().map(Self::Removed),
            BEGIN => Ok(Self::Begin),
            END => Ok(Self::End),
            value => Err(DecodeError { what: "announcement", value }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_invert_and_others_are_refused() {
        let hash = BlockHash(std::array::from_fn(|index| index as u8));
        let disk = Located { medium: Source::Disk, group: 7, hash };
        let memory = Located { medium: Source::Memory, group: 0, hash };
        let all = [
            Announcement::Stored(disk),
            Announcement::Removed(memory),
            Announcement::Begin,
            Announcement::End,
        ];
        for announcement in all {
            assert_eq!(Announcement::decode(&announcement.encode()), Ok(announcement));
        }
        for head in [0, 5, 1 | 9 << 8] {
            assert!(Announcement::decode(&[head, 0, 0, 0, 0, 0, 0, 0]).is_err(), "{head}");
        }
    }
}
