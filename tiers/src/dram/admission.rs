//! Who comes in: every block, or, with a filter, those that are asked for more often than what they would replace.

use super::{Dram, FillError};
use crate::index::Print;
use crate::sketch::Sketch;

// === impl Dram: admission ===

impl Dram {
    /// Admits, once the pool is full, only what was asked for more often than the block that it would replace, as in TinyLFU.
    /// A block of a size that has none in the pool comes in all the same.
    pub fn filter_admission(&mut self) {
        self.sketch = Some(Sketch::default());
    }

    /// Counts an access of a block that is there.
    #[inline]
    pub(super) fn touch(&mut self, id: u32) {
        self.policy.touch(&mut self.slab, id);
        if self.sketch.is_some() {
            self.count_entry(id);
        }
    }

    // Apart, so that a look-up without a filter stays short.
    #[cold]
    fn count_entry(&mut self, id: u32) {
        let print = self.print(id);
        self.count(print);
    }

    /// Counts that a key was asked for.
    #[inline]
    pub(super) fn count(&mut self, print: Print) {
        let slots = self.slots_in_service();
        if let Some(sketch) = &mut self.sketch {
            sketch.add(print, slots);
        }
    }

    /// Evicts a block for a new one, if that is admitted. This time the new one is asked for is not counted yet.
    pub(super) fn replace(&mut self, victim: u32, print: Print) -> Result<(), FillError> {
        if let Some(sketch) = &self.sketch
            && sketch.count(print) < sketch.count(self.print(victim))
        {
            return Err(FillError::NotAdmitted);
        }
        self.evict(victim);
        Ok(())
    }
}
