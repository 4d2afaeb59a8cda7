//! Sources of blocks. A source's number is the top byte of a reference's generation, and an announcement's medium.

/// Bits of a generation; one filling a nanosecond uses them up in two years.
const GENERATION_BITS: u32 = 56;
const GENERATION_MASK: u64 = u64::MAX >> (u64::BITS - GENERATION_BITS);

crate::named! {
    /// The tier of a found or announced block.
    #[derive(Default, Hash)]
    #[repr(u8)]
    pub enum Source {
        /// In the DRAM pool, even if another request brought it there.
        #[default]
        Memory = "memory" as 0,
        /// On a disk, and read from it for this request.
        Disk = "disk" as 1,
        /// At a peer, which sent it for this request.
        Peer = "peer" as 2,
    }
}

// === impl Source ===

impl Source {
    /// Returns the second word of a reference to a filling.
    pub(crate) fn mark(self, generation: u64) -> u64 {
        generation & GENERATION_MASK | u64::from(self as u8) << GENERATION_BITS
    }

    /// Returns the source and the generation in a reference's second word. An unknown source counts as
    /// memory.
    pub(crate) fn parse(word: u64) -> (Self, u64) {
        let number = (word >> GENERATION_BITS) as usize;
        (Self::ALL.get(number).copied().unwrap_or_default(), word & GENERATION_MASK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_says_source_and_generation() {
        for source in Source::ALL {
            assert_eq!(Source::parse(source.mark(7)), (source, 7));
        }
        assert_eq!(Source::parse(Source::Peer.mark(u64::MAX)), (Source::Peer, u64::MAX >> 8));
        assert_eq!(Source::parse(9 << 56 | 7), (Source::Memory, 7));
    }
}
