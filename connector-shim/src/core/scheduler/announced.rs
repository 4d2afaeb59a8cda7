//! The blocks that an engine has announced to routers, and the changes to announce next.
//!
//! Routers count references: for one block `stored` and `removed` alternate, even if the sidecar repeats an
//! announcement.

use std::collections::HashSet;

use shm_protocol::announcement::{Announcement, Located};

/// The most blocks announced to routers, some 300 MB here. Further blocks are not announced.
const ANNOUNCED_MAX: usize = 1 << 22;

/// A block that routers can now find at a place, or no longer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct BlockChange {
    /// The block, and its place.
    pub located: Located,
    /// True if the block is there now.
    pub stored: bool,
}

#[derive(Debug, Default)]
pub(super) struct Announced {
    /// How often the sidecar was asked for all blocks; 0: routers get no announcements.
    pub(super) asked: u64,
    announced: HashSet<Located>,
    /// Blocks announced before the sidecar's last `Begin`, and not announced by the sidecar since.
    doubted: HashSet<Located>,
    changes: Vec<BlockChange>,
}

// === impl Announced ===

impl Announced {
    /// Begins again with all blocks, for routers that have forgotten them.
    pub(super) fn again(&mut self) {
        *self = Self { asked: self.asked + 1, ..Self::default() };
    }

    /// Removes every block: the sidecar is gone.
    pub(super) fn end_all(&mut self) {
        self.apply_announcement(Announcement::Begin);
        self.apply_announcement(Announcement::End);
    }

    pub(super) fn apply_announcement(&mut self, announcement: Announcement) {
        match announcement {
            Announcement::Stored(located) => {
                if self.doubted.remove(&located) {
                    self.announced.insert(located);
                } else if self.announced.len() < ANNOUNCED_MAX && self.announced.insert(located) {
                    self.changes.push(BlockChange { located, stored: true });
                }
            }
            Announcement::Removed(located) => {
                if self.announced.remove(&located) || self.doubted.remove(&located) {
                    self.changes.push(BlockChange { located, stored: false });
                }
            }
            Announcement::Begin => {
                let announced = std::mem::take(&mut self.announced);
                self.doubted.extend(announced);
            }
            Announcement::End => {
                let gone = self.doubted.drain().map(|located| BlockChange { located, stored: false });
                self.changes.extend(gone);
            }
        }
    }

    pub(super) fn take_changes(&mut self) -> Vec<BlockChange> {
        std::mem::take(&mut self.changes)
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;
    use shm_protocol::source::Source;

    use super::*;

    fn block(number: u8) -> Located {
        Located { medium: Source::Memory, group: 0, hash: BlockHash([number; 32]) }
    }

    /// The changes after these announcements, by the blocks' numbers.
    fn changes_after(announced: &mut Announced, announcements: &[Announcement]) -> Vec<(u8, bool)> {
        announcements.iter().for_each(|announcement| announced.apply_announcement(*announcement));
        let mut changes: Vec<_> =
            announced.take_changes().iter().map(|change| (change.located.hash.0[0], change.stored)).collect();
        changes.sort_unstable();
        changes
    }

    #[test]
    fn a_block_is_told_of_in_turns() {
        use Announcement::{Begin, End, Removed, Stored};
        let mut announced = Announced::default();
        let all = [Begin, Stored(block(1)), Stored(block(2)), Stored(block(1)), End];
        assert_eq!(changes_after(&mut announced, &all), [(1, true), (2, true)]);
        let changes = [Removed(block(2)), Removed(block(2)), Removed(block(9)), Stored(block(3))];
        assert_eq!(changes_after(&mut announced, &changes), [(2, false), (3, true)]);
        // Block 1 went and block 4 came while nothing was announced.
        let anew = [Begin, Stored(block(3)), Stored(block(4)), End];
        assert_eq!(changes_after(&mut announced, &anew), [(1, false), (4, true)]);
        // `Begin` comes twice, with a removal in between.
        let twice = [Begin, Stored(block(3)), Begin, Removed(block(4)), Stored(block(3)), End];
        assert_eq!(changes_after(&mut announced, &twice), [(4, false)]);
        announced.end_all();
        assert_eq!(changes_after(&mut announced, &[]), [(3, false)]);
    }

    #[test]
    fn who_has_forgotten_all_is_told_again() {
        use Announcement::{Begin, End, Removed, Stored};
        let mut announced = Announced::default();
        assert_eq!(changes_after(&mut announced, &[Begin, Stored(block(1)), Stored(block(2)), End]).len(), 2);
        announced.again();
        // The sidecar has not seen the request for all blocks yet.
        assert_eq!(changes_after(&mut announced, &[Removed(block(2)), Stored(block(3))]), [(3, true)]);
        let anew = [Begin, Stored(block(1)), Stored(block(3)), End];
        assert_eq!(changes_after(&mut announced, &anew), [(1, true)]);
    }
}
