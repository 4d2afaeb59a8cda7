//! Parents and children among kept blocks: a parent goes after its children.
//!
//! An entry has the number of its parent's entry, and counts its children. A parent is filled before its children. If the parent's
//! slot is filled again, its generation is higher than the child's, and the child has no parent any more.

use super::{Slab, State};
use crate::entries::Entry;
use crate::list::NIL;

// === impl Slab: kin ===

impl Slab {
    /// Makes a block the child of another, unless it has a parent or was filled before the other.
    pub(crate) fn adopt_child(&mut self, parent: u32, child: u32) {
        let before = self.entries.get(parent).generation;
        let entry = self.entries.get_mut(child);
        if entry.parent != NIL || before >= entry.generation {
            return;
        }
        entry.parent = parent;
        let entry = self.entries.get_mut(parent);
        match entry.children() {
            Entry::CHILDREN_MAX => *self.many.get_mut(&parent).expect("counted from the third on") += 1,
            few => {
                entry.set_children(few + 1);
                if few + 1 == Entry::CHILDREN_MAX {
                    self.many.insert(parent, u32::from(few) + 1);
                }
            }
        }
    }

    /// Ends the ties of a leaving block to its parent and its children. Returns the parent if this was its last child.
    pub(crate) fn part(&mut self, child: u32) -> Option<u32> {
        let entry = self.entries.get_mut(child);
        if entry.children() == Entry::CHILDREN_MAX {
            self.many.remove(&child);
        }
        entry.set_children(0);
        let (parent, generation) = (std::mem::replace(&mut entry.parent, NIL), entry.generation);
        let of_before = self.entries.get_or_vacant(parent);
        let is_there = of_before.generation < generation
            && matches!(of_before.state(), State::Committed | State::Removed);
        if parent == NIL || !is_there {
            return None;
        }
        let entry = self.entries.get_mut(parent);
        let left = match entry.children() {
            0 => return None,
            Entry::CHILDREN_MAX => {
                let many = self.many.get_mut(&parent).expect("counted from the third on");
                *many -= 1;
                *many
            }
            few => u32::from(few) - 1,
        };
        if left < u32::from(Entry::CHILDREN_MAX) {
            entry.set_children(left as u8);
            self.many.remove(&parent);
        }
        (left == 0).then_some(parent)
    }

    /// Returns the parent of a block, if it is kept.
    pub(crate) fn parent(&self, id: u32) -> Option<u32> {
        let entry = self.entries.get(id);
        let parent = self.entries.get_or_vacant(entry.parent);
        let is_there = parent.generation < entry.generation && parent.is_committed();
        is_there.then_some(entry.parent)
    }

    /// Returns the number of a block's kept children.
    pub(crate) fn children(&self, id: u32) -> u32 {
        match self.entries.get(id).children() {
            Entry::CHILDREN_MAX => self.many[&id],
            few => few.into(),
        }
    }
}
