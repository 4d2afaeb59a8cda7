//! Parents and children among kept blocks: a parent goes after its children.
//!
//! An entry has the number of its parent's entry, and counts its children. A parent is mostly filled before its children. If the
//! parent's slot is filled again, its generation is higher than the child's, and the child has no parent any more. A parent filled
//! later is marked in the child. If such a parent goes before the child, the next block in its slot may count a child too few, and go
//! before one.

use super::{Slab, SlotState};
use crate::entries::SlotEntry;
use crate::list::NIL;

// === impl Slab: kin ===

impl Slab {
    /// Makes a block the child of another, unless it has a parent.
    pub(crate) fn adopt_child(&mut self, parent: u32, child: u32) {
        if self.parent(child).is_some() {
            return;
        }
        let generation = self.entries.get(parent).generation;
        let entry = self.entries.get_mut(child);
        entry.parent = parent;
        entry.claims.set_late_parent(generation > entry.generation);
        let entry = self.entries.get_mut(parent);
        match entry.children() {
            SlotEntry::CHILDREN_MAX => *self.many.get_mut(&parent).expect("counted from the third on") += 1,
            few => {
                entry.set_children(few + 1);
                if few + 1 == SlotEntry::CHILDREN_MAX {
                    self.many.insert(parent, u32::from(few) + 1);
                }
            }
        }
    }

    /// Ends the ties of a leaving block to its parent and its children. Returns the parent if this was its last child.
    pub(crate) fn part(&mut self, child: u32) -> Option<u32> {
        let entry = self.entries.get_mut(child);
        if entry.children() == SlotEntry::CHILDREN_MAX {
            self.many.remove(&child);
        }
        entry.set_children(0);
        let parent = std::mem::replace(&mut entry.parent, NIL);
        let (child, before) = (self.entries.get(child), self.entries.get_or_vacant(parent));
        let is_whole = matches!(before.state(), SlotState::Committed | SlotState::Removed);
        if parent == NIL || !is_whole || !is_parent(before, child) {
            return None;
        }
        let entry = self.entries.get_mut(parent);
        let left = match entry.children() {
            0 => return None,
            SlotEntry::CHILDREN_MAX => {
                let many = self.many.get_mut(&parent).expect("counted from the third on");
                *many -= 1;
                *many
            }
            few => u32::from(few) - 1,
        };
        if left < u32::from(SlotEntry::CHILDREN_MAX) {
            entry.set_children(left as u8);
            self.many.remove(&parent);
        }
        (left == 0).then_some(parent)
    }

    /// Returns the parent of a block, if it is kept.
    pub(crate) fn parent(&self, id: u32) -> Option<u32> {
        let entry = self.entries.get(id);
        let parent = self.entries.get_or_vacant(entry.parent);
        (parent.is_committed() && is_parent(parent, entry)).then_some(entry.parent)
    }

    /// Returns the number of a block's kept children.
    pub(crate) fn children(&self, id: u32) -> u32 {
        match self.entries.get(id).children() {
            SlotEntry::CHILDREN_MAX => self.many[&id],
            few => few.into(),
        }
    }
}

/// True if the block in the slot of a child's parent is that parent, and no later one.
fn is_parent(entry: &SlotEntry, child: &SlotEntry) -> bool {
    match child.claims.has_late_parent() {
        true => entry.generation > child.generation,
        false => entry.generation < child.generation,
    }
}
