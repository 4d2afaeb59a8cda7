//! The engines of a role with the beginnings of prompts, by the last prompts of each session and
//! conversation, in bounded memory.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::address::EngineUrl;

/// The most beginnings of a generation. Two generations of 40 bytes each take 5 MiB, for 30,000 conversations of 4 turns.
const ENTRIES_MAX: usize = 1 << 16;
/// Several engines have a beginning shared by all conversations. The table keeps the last ones.
const HOLDERS_MAX: usize = 4;

/// The beginnings of one prompt, by their hashes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Trail {
    /// A hash of the session named by the client.
    pub(super) session: Option<u64>,
    /// A beginning of a prompt, and its hash.
    pub(super) marks: Vec<PromptMark>,
    /// True if the stored response of the request is at this session's engine alone.
    pub(super) is_bound: bool,
    /// Bytes of the whole prompt, as the client wrote it.
    pub(super) bytes: u64,
    /// The blocks that the mesh shows, for a conversation unknown here.
    pub(super) held: HeldPrompt,
}

/// Leading tokens of a prompt, by the engines whose nodes keep them in memory.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct HeldPrompt {
    /// Tokens of the whole prompt.
    pub(super) tokens: u64,
    pub(super) held: Vec<(EngineUrl, u64)>,
}

/// A beginning of a prompt.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct PromptMark {
    pub(super) hash: u64,
    pub(super) bytes: u64,
    /// True if the beginning belongs to one conversation, false for a system prompt shared by many.
    pub(super) is_own: bool,
    /// True if it ends with an answer: the engine of the turn before made it.
    pub(super) is_answer: bool,
}

/// The engines of a role with a beginning of one prompt, and the length of that beginning.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct KnownPrompt {
    /// Numbers of the engines with this beginning, the last one first, and the bytes that each has.
    holders: Vec<(u32, u64)>,
    pub(super) is_own: bool,
}

/// The engines of a role with beginnings of prompts.
#[derive(Debug, Default)]
pub(super) struct Affinity(Mutex<AffinityTable>);

/// Two generations: a full young one replaces the old one, and a beginning of a new prompt becomes young
/// again.
#[derive(Debug, Default)]
struct AffinityTable {
    young: HashMap<u64, Holders>,
    old: HashMap<u64, Holders>,
}

/// Engines by their numbers, the last one first; 0 is none.
type Holders = [u32; HOLDERS_MAX];

/// The holders of a beginning of so many bytes.
fn numbers(holders: Holders, bytes: u64) -> Vec<(u32, u64)> {
    holders.into_iter().filter(|holder| *holder != 0).map(|holder| (holder, bytes)).collect()
}

// === impl Trail ===

impl Trail {
    /// The trail of a response stored by one engine; `hash` is of its id.
    pub(super) fn bound(hash: u64) -> Self {
        Self { session: Some(hash), is_bound: true, ..Self::default() }
    }

    /// Returns the bytes of the beginning shared with other conversations; 0 if nothing shows where a conversation begins, as in a text.
    fn shared_bytes(&self) -> u64 {
        let shared = self.marks.iter().take_while(|mark| !mark.is_own).last();
        let has_own = self.marks.iter().any(|mark| mark.is_own);
        shared.filter(|_| has_own).map_or(0, |mark| mark.bytes)
    }

    /// Returns the tokens behind a beginning of so many bytes, if the prompt has `tokens`.
    fn tokens_behind(&self, bytes: u64, tokens: u64) -> u64 {
        let share = 1.0 - bytes.min(self.bytes) as f64 / self.bytes.max(1) as f64;
        (tokens as f64 * share).ceil() as u64
    }
}

// === impl HeldPrompt ===

impl HeldPrompt {
    /// Returns true if no engine's node has any of the prompt.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Returns the tokens at an engine.
    pub(super) fn at(&self, url: &EngineUrl) -> u64 {
        self.held.iter().filter(|(of, _)| of == url).map(|(_, tokens)| *tokens).max().unwrap_or(0)
    }
}

// === impl KnownPrompt ===

impl KnownPrompt {
    /// Returns the knowledge of a prompt by the tokens that engines hold, each with its number. The conversation is theirs if they have a
    /// quarter of what lies behind the beginning shared by many.
    pub(super) fn of_held(mut held: Vec<(u32, u64)>, trail: &Trail) -> Self {
        held.retain(|(_, tokens)| *tokens > 0);
        held.sort_by_key(|(_, tokens)| std::cmp::Reverse(*tokens));
        let share = |tokens: u64| tokens as f64 / trail.held.tokens.max(1) as f64;
        let bytes = |tokens: u64| (share(tokens).min(1.0) * trail.bytes as f64) as u64;
        let holders: Vec<_> = held.into_iter().map(|(engine, tokens)| (engine, bytes(tokens))).collect();
        let shared = trail.shared_bytes();
        let is_own = holders
            .first()
            .is_some_and(|(_, bytes)| bytes.saturating_sub(shared) * 4 >= trail.bytes.saturating_sub(shared));
        Self { holders, is_own }
    }

    /// Returns true if these engines have at least half of the prompt, or it is one of their conversations.
    pub(super) fn is_mostly(&self, trail: &Trail) -> bool {
        self.is_own || self.holders.first().is_some_and(|(_, bytes)| bytes * 2 >= trail.bytes)
    }

    /// Returns 0 for the last engine that got the beginning, 1 for the one before it; `None` if this engine
    /// did not.
    pub(super) fn rank(&self, engine: u32) -> Option<usize> {
        self.holders.iter().position(|(holder, _)| *holder == engine)
    }

    /// Returns the tokens to compute at an engine, of a prompt of `weight` tokens.
    pub(super) fn remaining_tokens(&self, engine: u32, weight: u64, trail: &Trail) -> u64 {
        trail.tokens_behind(self.rank(engine).map_or(0, |rank| self.holders[rank].1), weight)
    }
}

// === impl Affinity ===

impl Affinity {
    /// The engines of a prompt's session, or without a session those of its longest known beginning.
    pub(super) fn known(&self, trail: &Trail) -> KnownPrompt {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let longest = table.longest(trail).map(|(at, holders)| (trail.marks[at], holders));
        let session = trail.session.and_then(|session| table.get(session));
        let bytes = longest.map_or(0, |(mark, _)| mark.bytes);
        let (holders, is_own) = match (session, longest) {
            (Some(holders), _) => (holders, true),
            (None, Some((mark, holders))) => (holders, mark.is_own),
            (None, None) => return KnownPrompt::default(),
        };
        KnownPrompt { holders: numbers(holders, bytes), is_own }
    }

    /// The engines that answered the longest known beginning of a prompt. They have their own answer behind it.
    pub(super) fn answered(&self, trail: &Trail) -> KnownPrompt {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((at, holders)) = table.longest(trail) else { return KnownPrompt::default() };
        let (mark, next) = (trail.marks[at], trail.marks.get(at + 1));
        let bytes = next.filter(|next| next.is_answer).unwrap_or(&mark).bytes;
        KnownPrompt { holders: numbers(holders, bytes), is_own: mark.is_own }
    }

    /// Notes an engine as one that answered this prompt, of any session.
    pub(super) fn note_answered(&self, trail: &Trail, engine: u32) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        trail.marks.iter().for_each(|mark| table.insert_holder(mark.hash, engine));
    }

    /// Notes an engine as one with this prompt.
    pub(super) fn note_holder(&self, trail: &Trail, engine: u32) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let hashes = trail.marks.iter().map(|mark| mark.hash).chain(trail.session);
        hashes.for_each(|hash| table.insert_holder(hash, engine));
    }
}

// === impl AffinityTable ===

impl AffinityTable {
    /// The longest known beginning, by its place, and its engines.
    fn longest(&mut self, trail: &Trail) -> Option<(usize, Holders)> {
        (0..trail.marks.len()).rev().find_map(|at| Some((at, self.get(trail.marks[at].hash)?)))
    }

    fn get(&mut self, hash: u64) -> Option<Holders> {
        self.young.get(&hash).or_else(|| self.old.get(&hash)).copied()
    }

    fn insert_holder(&mut self, hash: u64, engine: u32) {
        let mut holders = self.get(hash).unwrap_or_default();
        let last = holders.iter().position(|holder| *holder == engine).unwrap_or(HOLDERS_MAX - 1);
        holders[..=last].rotate_right(1);
        holders[0] = engine;
        if self.young.len() >= ENTRIES_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, holders);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trail(session: Option<u64>, hashes: &[u64]) -> Trail {
        let mark = |(hash, bytes): (&u64, u64)| PromptMark {
            hash: *hash,
            bytes: 100 * bytes,
            is_own: bytes > 1,
            is_answer: bytes == 4,
        };
        let marks: Vec<_> = hashes.iter().zip(1..).map(mark).collect();
        Trail { session, bytes: 100 * marks.len() as u64, marks, ..Trail::default() }
    }

    #[test]
    fn a_prompt_is_known_by_its_session_or_else_by_its_longest_beginning() {
        let affinity = Affinity::default();
        assert_eq!(affinity.known(&trail(None, &[1, 2])), KnownPrompt::default());
        affinity.note_holder(&trail(None, &[1, 2, 3]), 7);
        affinity.note_holder(&trail(None, &[1, 5]), 8);
        let own = affinity.known(&trail(None, &[1, 2, 3, 4, 6]));
        assert_eq!((own.rank(7), own.rank(8), own.is_own), (Some(0), None, true));
        assert_eq!(
            (
                own.remaining_tokens(7, 1000, &trail(None, &[0; 5])),
                own.remaining_tokens(8, 1000, &trail(None, &[0; 5]))
            ),
            (400, 1000)
        );
        let answered = affinity.answered(&trail(Some(90), &[1, 2, 3, 4, 6]));
        assert_eq!(
            answered.remaining_tokens(7, 1000, &trail(None, &[0; 5])),
            200,
            "it has its own answer, too"
        );
        let shared = affinity.known(&trail(None, &[1, 9]));
        assert_eq!((shared.rank(8), shared.rank(7), shared.is_own), (Some(0), Some(1), false));
        affinity.note_holder(&trail(Some(90), &[40]), 6);
        assert_eq!(affinity.known(&trail(Some(90), &[1, 2])).rank(6), Some(0), "whatever the prompt is");
    }

    #[test]
    fn a_conversation_is_that_of_engines_with_more_than_the_beginning_shared_by_all() {
        let url: EngineUrl = "http://a:1".parse().unwrap();
        let held = |tokens| HeldPrompt { tokens: 1000, held: vec![(url.clone(), tokens)] };
        // The system prompt is a fifth of the prompt.
        let chat = |tokens| Trail { held: held(tokens), ..trail(None, &[1, 2, 3, 4, 5]) };
        let known = |trail: &Trail| KnownPrompt::of_held(vec![(7, trail.held.at(&url)), (8, 0)], trail);
        assert!(!known(&chat(200)).is_own && !known(&chat(399)).is_own);
        assert!(known(&chat(400)).is_own);
        assert_eq!(known(&chat(400)).remaining_tokens(7, 1000, &chat(400)), 600);
        assert_eq!(known(&chat(400)).remaining_tokens(8, 1000, &chat(400)), 1000);
        assert_eq!(known(&chat(0)), KnownPrompt::default());
        // In a text nothing shows where a conversation begins.
        let text = |tokens| Trail { held: held(tokens), ..trail(None, &[1]) };
        assert!(!known(&text(249)).is_own && known(&text(250)).is_own);
    }

    #[test]
    fn what_is_not_asked_for_any_more_is_forgotten() {
        let affinity = Affinity::default();
        affinity.note_holder(&trail(None, &[1]), 7);
        for hash in 2..3 * ENTRIES_MAX as u64 {
            affinity.note_holder(&trail(None, &[hash]), 8);
            if hash % 1000 == 0 {
                affinity.note_holder(&trail(None, &[2]), 8);
            }
        }
        let is_known = |hash| affinity.known(&trail(None, &[hash])) != KnownPrompt::default();
        assert_eq!((is_known(1), is_known(2)), (false, true));
        let table = affinity.0.lock().unwrap();
        assert!(table.young.len() <= ENTRIES_MAX && table.old.len() <= ENTRIES_MAX);
    }
}
