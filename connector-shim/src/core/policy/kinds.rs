//! Cache groups by kind. A request's hit is found by one question to all groups, [`GroupSet::serve_request`].

use std::ops::Range;

/// The most boundaries tried for one question; of these, the first ones are all boundaries, the later ones
/// only checkpoints. Each try costs a query of a window's blocks, 6 us for 64 of them, and the next one is at
/// most a window below.
const TRIES_MAX: u32 = 32;
const TRIES_IN_TURN: u32 = 16;

/// The blocks before a boundary that the next token reads.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum GroupKind {
    /// All blocks.
    Full,
    /// The last blocks.
    Window {
        /// Number of these blocks.
        reads: u32,
    },
    /// The last block: the state of the layers at the boundary. The engine names the states that it has made,
    /// and their blocks.
    State,
}

/// The keys named by a question to a group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum AskedKeys {
    /// Keys of the group's log.
    Of(Range<u32>),
    /// The key of a block of full attention filled up to this token, as far as a hit reads it.
    Tail(u32),
}

/// A cache group.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct GroupForm {
    /// The blocks asked for and saved. A single group counts as [`GroupKind::Full`], also with windows.
    pub kind: GroupKind,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Hashes of a request for each block; the last of them is the block's key.
    pub hashes_each: u32,
    /// Tokens from one key of a request's log to the next: those of a block or, where states are made within blocks, of a hash.
    pub key_tokens: u32,
    /// Tokens read by the layers, if the engine frees the blocks before them; 0: it keeps all.
    pub window: u32,
}

/// All cache groups of an engine.
#[derive(Clone, Debug)]
pub struct GroupSet {
    /// By number.
    pub forms: Vec<GroupForm>,
    /// Tokens from one boundary of all groups' blocks to the next.
    pub boundary: u32,
    /// Tokens from one possible end of a hit to the next: the boundary or, where states are made within blocks, less.
    pub unit: u32,
    /// Tokens from one checkpoint to the next, a multiple of the boundary; 0: there are none.
    pub checkpoint: u32,
    /// Tokens that the engine takes from the end of each hit of its own cache, for a drafter; 0: none.
    pub dropped: u32,
}

/// How far a request is served.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum ServedTokens {
    /// Up to this token.
    To(u32),
    /// Some group will know later. The boundary tried last, if any.
    Pending(Option<u32>),
}

/// The blocks of a group to save: those a later request reads at a point where it may go on.
#[derive(Copy, Clone, Debug)]
pub struct Points {
    /// Blocks between two points of every prompt; 0: there are none.
    pub every: u32,
    /// Blocks between two possible points.
    pub boundary: u32,
    /// Blocks from the last state of a prompt to the last point; 0: there are no states, or a state at that point.
    pub dropped: u32,
}

// === impl GroupForm ===

impl GroupForm {
    /// The blocks loaded for a hit from `first` up to `end`, both in tokens; the engine has those before `first`.
    pub fn loaded(&self, first: u32, end: u32) -> Range<u32> {
        let (first, end) = (first / self.block_tokens, end.div_ceil(self.block_tokens));
        let reads = match self.kind {
            GroupKind::Full => u32::MAX,
            GroupKind::Window { reads } => reads,
            GroupKind::State => 1,
        };
        first.max(end.saturating_sub(reads))..end.max(first)
    }

    /// True if a hit up to `end` reads the beginning of a block of full attention.
    pub fn has_tail(&self, end: u32) -> bool {
        self.kind == GroupKind::Full && !end.is_multiple_of(self.block_tokens)
    }

    /// Number of a request's hashes for each key.
    pub(super) fn hashes_of_key(&self) -> u32 {
        self.key_tokens * self.hashes_each / self.block_tokens
    }
}

// === impl GroupSet ===

impl GroupSet {
    /// Groups with checkpoints `checkpoint_tokens` apart, or a little more; 0: none.
    pub fn new(forms: Vec<GroupForm>, checkpoint_tokens: u32) -> Self {
        let boundary = forms.iter().fold(1, |all, form| lcm(all, form.block_tokens));
        let checkpoint = checkpoint_tokens.div_ceil(boundary) * boundary;
        let within = forms.iter().filter(|form| form.key_tokens < form.block_tokens);
        let unit = within.map(|form| form.key_tokens).min().unwrap_or(boundary);
        Self { forms, boundary, unit, checkpoint, dropped: 0 }
    }

    /// The same groups of an engine that takes a unit from the end of each hit of its own cache, if it `drops`.
    #[must_use]
    pub fn dropping(self, drops: bool) -> Self {
        Self { dropped: if drops { self.unit } else { 0 }, ..self }
    }

    /// True if hits may end within blocks of full attention, under a separate key.
    pub fn has_tails(&self) -> bool {
        self.unit < self.boundary
    }

    /// True if there are several groups.
    pub fn several(&self) -> bool {
        self.forms.len() > 1
    }

    /// True if a prompt's loaded part may end at any block that did not come: then more may be promised than
    /// the sidecar's pool holds.
    pub fn may_stream(&self) -> bool {
        !self.several() && self.forms[0].kind == GroupKind::Full && self.forms[0].window == 0
    }

    /// The groups with full attention, or the other ones, by number.
    pub fn groups_of(&self, others: bool) -> impl Iterator<Item = usize> {
        (0..self.forms.len()).filter(move |group| (self.forms[*group].kind != GroupKind::Full) == others)
    }

    /// True if some group keeps states.
    pub fn has_states(&self) -> bool {
        self.forms.iter().any(|form| form.kind == GroupKind::State)
    }

    /// The number of the group whose loads are reported as the request's loads.
    pub fn reported_group(&self) -> usize {
        self.groups_of(false).next().unwrap_or(0)
    }

    /// Returns the highest possible end of a hit within so many tokens.
    pub fn floor(&self, tokens: u32) -> u32 {
        tokens - tokens % self.unit
    }

    /// Returns the boundary at which the engine's own cache looks for a state first, if full attention has `run` tokens.
    pub fn junction(&self, run: u32) -> u32 {
        let end = run.saturating_sub(self.dropped);
        end - end % self.boundary
    }

    /// True if a hit up to `end` adds no more to the engine's own `first` tokens than the engine has dropped, as far as is
    /// known: full attention has `run` tokens. With more tokens the engine's own hit would end there, too.
    pub fn is_dropped(&self, (first, end): (u32, u32), run: u32) -> bool {
        end <= first + self.boundary && (end..end + self.dropped).contains(&run)
    }

    /// Returns the highest possible end below the first missing key of a group, at place `missing`; `limit`
    /// counts as one.
    fn below(&self, group: usize, missing: u32, limit: u32) -> u32 {
        limit.min(self.floor((missing + 1) * self.forms[group].key_tokens - 1))
    }

    /// Returns the keys to ask for, for a hit from `first` up to `end`: all keys in a group with states, to
    /// learn the last kept one.
    pub fn asked(&self, group: usize, first: u32, end: u32) -> Range<u32> {
        let form = &self.forms[group];
        match form.kind {
            GroupKind::State => first / form.key_tokens..end.max(first) / form.key_tokens,
            GroupKind::Full if self.has_tails() => form.loaded(first, end - end % form.block_tokens),
            _ => form.loaded(first, end),
        }
    }

    /// Returns the keys of the blocks loaded for a hit from `first` up to `end`, except a tail.
    pub fn loaded_keys(&self, group: usize, first: u32, end: u32) -> Range<u32> {
        let asked = self.asked(group, first, end);
        match self.forms[group].kind {
            GroupKind::State => asked.start.max(asked.end.saturating_sub(1))..asked.end,
            _ => asked,
        }
    }

    /// Returns how far all groups have the blocks of `first..limit` that a request reads, in tokens.
    /// `present` returns the number of asked keys before the first missing one; for states, the number up to
    /// the last kept one; `None`: not known yet. `parted` gets the end up to which full groups have all
    /// blocks. `tried`: the end of the last pending answer.
    pub fn serve_request<W>(
        &self,
        (first, limit): (u32, u32),
        tried: Option<u32>,
        mut present: impl FnMut(usize, AskedKeys) -> Result<Option<u32>, W>,
        mut parted: impl FnMut(u32),
    ) -> Result<ServedTokens, W> {
        let mut end = limit;
        for group in self.groups_of(false) {
            let keys = self.asked(group, first, limit);
            let found = if keys.is_empty() { Some(0) } else { present(group, AskedKeys::Of(keys.clone()))? };
            let Some(found) = found else { return Ok(ServedTokens::Pending(tried)) };
            end = end.min(self.below(group, keys.start + found, limit));
        }
        // No end of a hit within a block is a junction: what follows may still be in the block.
        parted(if self.has_tails() { end - end % self.boundary } else { end });
        end = end.min(tried.unwrap_or(end));
        for count in 0..TRIES_MAX {
            if count >= TRIES_IN_TURN && self.checkpoint > 0 {
                end -= end % self.checkpoint;
            }
            if end <= first {
                // A checkpoint may lie before the engine's own tokens.
                return Ok(ServedTokens::To(first));
            }
            let asked = end;
            for group in self.groups_of(true) {
                let keys = self.asked(group, first, end);
                if keys.is_empty() {
                    continue;
                }
                let Some(found) = present(group, AskedKeys::Of(keys.clone()))? else {
                    return Ok(ServedTokens::Pending(Some(asked)));
                };
                if found < keys.len() as u32 {
                    // A boundary beyond a missing block reads it, as far as this one does. States are kept at some boundaries.
                    end = self.below(group, keys.start + found, limit);
                    break;
                }
            }
            if end < asked {
                continue;
            }
            let tails =
                self.groups_of(false).filter(|group| self.has_tails() && self.forms[*group].has_tail(end));
            for group in tails {
                let Some(found) = present(group, AskedKeys::Tail(end))? else {
                    return Ok(ServedTokens::Pending(Some(asked)));
                };
                if found == 0 {
                    end -= self.unit;
                    break;
                }
            }
            if end == asked {
                return Ok(ServedTokens::To(end));
            }
        }
        Ok(ServedTokens::To(first))
    }
}

fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

// === impl Points ===

impl Points {
    pub(super) fn new(set: &GroupSet, group: usize) -> Self {
        let size = set.forms[group].block_tokens;
        let boundary = (set.unit / size).max(1);
        let dropped = if set.has_states() && set.dropped > 0 { boundary } else { 0 };
        Self { every: set.checkpoint / size, boundary, dropped }
    }

    /// The parts of the blocks `first..end` of a group without states to save, of a request with `prompt` whole blocks before its prompt's last token, and with its
    /// `own` points.
    pub fn needed(
        &self,
        kind: GroupKind,
        (mut first, end): (u32, u32),
        prompt: u32,
        own: [u32; 2],
    ) -> Vec<Range<u32>> {
        let GroupKind::Window { reads } = kind else { return std::iter::once(first..end).collect() };
        let prompt = (prompt - prompt % self.boundary).saturating_sub(self.dropped);
        let mut points = own.to_vec();
        if self.every > 0 {
            points.extend((self.every..end + reads).step_by(self.every as usize));
        }
        points.retain(|point| *point < prompt);
        // From the prompt's last point on, a later request may go on at every boundary.
        let answer = prompt.max(first - first % self.boundary);
        points.extend((answer..end + reads).step_by(self.boundary as usize));
        points.sort_unstable();
        let mut needed: Vec<Range<u32>> = Vec::new();
        for point in points {
            let (begin, stop) = (point.saturating_sub(reads).max(first), point.min(end));
            if begin >= stop {
                continue;
            }
            match needed.last_mut() {
                Some(last) if last.end == begin => last.end = stop,
                _ => needed.push(begin..stop),
            }
            first = stop;
        }
        needed
    }

    /// The first block from `block` on that is read at a boundary of all groups.
    pub fn next_needed(&self, kind: GroupKind, block: u32) -> u32 {
        let GroupKind::Window { reads } = kind else { return block };
        let within = self.boundary.saturating_sub(reads);
        block.max(block - block % self.boundary + within)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use shm_protocol::random::Random;

    use super::*;

    const CASES: u64 = 5_000;
    const GROUPS_MAX: u64 = 4;

    /// Groups of an engine, the kept blocks of each, and a question.
    #[derive(Debug)]
    struct Case {
        set: GroupSet,
        /// By group and key.
        present: Vec<Vec<bool>>,
        /// Beginnings of blocks, by group and end in units.
        tails: Vec<Vec<bool>>,
        first: u32,
        limit: u32,
        tried: Option<u32>,
    }

    fn below(random: &mut Random, end: u64) -> u32 {
        (random.next() % end) as u32
    }

    /// A question over `boundaries` possible ends of a hit at most.
    fn case(seed: u64, boundaries: u64) -> Case {
        let random = &mut Random(seed);
        let groups = 1 + random.next() % GROUPS_MAX;
        // Blocks of windows are no larger than a unit then.
        let unit = if groups > 1 && random.next().is_multiple_of(3) { 2 } else { 0 };
        let forms: Vec<GroupForm> = (0..groups)
            .map(|_| {
                let kind = match below(random, 7) {
                    0 => GroupKind::Full,
                    6 if groups > 1 => GroupKind::State,
                    reads => GroupKind::Window { reads },
                };
                let block_tokens = match kind {
                    GroupKind::Window { .. } if unit > 0 => unit,
                    _ if unit > 0 => unit * (1 + below(random, 4)),
                    _ => [1, 2, 3, 4, 8][below(random, 5) as usize],
                };
                let key_tokens = if kind == GroupKind::State && unit > 0 { unit } else { block_tokens };
                GroupForm { kind, block_tokens, hashes_each: 1, key_tokens, window: 0 }
            })
            .collect();
        let checkpoint = below(random, 40);
        let set = GroupSet::new(forms, checkpoint);
        let first = set.boundary * below(random, 3);
        let limit = first + set.unit * (1 + below(random, boundaries));
        // A hit of a single group may end within a block.
        let limit = if set.several() { limit } else { limit - below(random, u64::from(set.boundary)) };
        // Much of it, or all but little.
        let lacks = [3, 10, 50, 1000][below(random, 4) as usize];
        let kept = |form: &GroupForm, random: &mut Random| {
            (0..limit.div_ceil(form.key_tokens)).map(|_| !random.next().is_multiple_of(lacks)).collect()
        };
        let of_ends = |random: &mut Random| {
            (0..=limit / set.unit).map(|_| !random.next().is_multiple_of(lacks)).collect()
        };
        let present = set.forms.iter().map(|form| kept(form, random)).collect();
        let tails = set.forms.iter().map(|_| of_ends(random)).collect();
        let tried = random.next().is_multiple_of(4).then(|| first + set.unit * below(random, boundaries + 1));
        Case { set, present, tails, first, limit, tried: tried.map(|tried| tried.min(limit)) }
    }

    impl Case {
        /// Whether the groups of one sort, or of both, have all blocks loaded for a hit up to `end`.
        fn has(&self, end: u32, windows: &[bool]) -> bool {
            let mut groups = windows.iter().flat_map(|windows| self.set.groups_of(*windows));
            groups.all(|group| {
                let GroupForm { kind, key_tokens, .. } = self.set.forms[group];
                let in_units = self.set.has_tails();
                let last = if in_units { end / key_tokens } else { end.div_ceil(key_tokens) };
                let is_read = |block: &u32| match kind {
                    GroupKind::Full => true,
                    GroupKind::Window { reads } => block + reads >= last,
                    GroupKind::State => block + 1 == last,
                };
                let mut read = (self.first / key_tokens..last).filter(is_read);
                let has_tail = in_units && end > self.first && self.set.forms[group].has_tail(end);
                read.all(|block| self.present[group][block as usize])
                    && (!has_tail || self.tails[group][(end / self.set.unit) as usize])
            })
        }

        /// The highest end up to `most` with all its blocks in those groups.
        fn highest(&self, most: u32, windows: &[bool]) -> u32 {
            let ends = (self.first..=most).rev();
            let mut ends = ends.filter(|end| *end == self.limit || end.is_multiple_of(self.set.unit));
            ends.find(|end| self.has(*end, windows)).unwrap_or(self.first)
        }

        /// The hit if every group but `late` answers at once, how far full groups were said to have it, and the number of questions.
        fn serve(&self, late: Option<usize>) -> (ServedTokens, Option<u32>, u32) {
            let (mut parted, mut questions) = (None, 0);
            let served = self.set.serve_request(
                (self.first, self.limit),
                self.tried,
                |group, keys| {
                    questions += 1;
                    let blocks = match keys {
                        AskedKeys::Of(keys) => keys,
                        AskedKeys::Tail(end) => {
                            let known = self.tails[group][(end / self.set.unit) as usize];
                            return Ok((Some(group) != late).then_some(u32::from(known)));
                        }
                    };
                    assert!(!blocks.is_empty(), "nothing is no question");
                    let present = |block: &u32| self.present[group][*block as usize];
                    let first = blocks.start;
                    let hits = match self.set.forms[group].kind {
                        GroupKind::State => blocks.rev().find(present).map_or(0, |last| last + 1 - first),
                        _ => blocks.take_while(present).count() as u32,
                    };
                    Ok::<_, Infallible>((Some(group) != late).then_some(hits))
                },
                |end| parted = Some(end),
            );
            let Ok(served) = served;
            (served, parted, questions)
        }
    }

    /// The highest boundary with all its blocks in each group, found by trying all of them.
    #[test]
    fn a_request_is_served_up_to_the_highest_boundary_that_all_groups_have() {
        let mut ends = [0; 3];
        for seed in 0..CASES {
            let case = case(seed, u64::from(TRIES_IN_TURN) - 2);
            let most = case.tried.unwrap_or(case.limit);
            let right = case.highest(most, &[true, false]);
            let (served, parted, _) = case.serve(None);
            assert_eq!(served, ServedTokens::To(right), "{seed}: {case:?}");
            let parts = case.highest(case.limit, &[false]);
            if !case.set.has_tails() {
                assert_eq!(parted, Some(parts), "{seed}: {case:?}");
            }
            assert!(parted.is_some_and(|end| end <= case.limit), "{seed}: {case:?}");
            ends[usize::from(right > case.first) + usize::from(right == most)] += 1;
        }
        assert!(ends.iter().all(|count| *count > CASES / 20), "one-sided cases: {ends:?}");
    }

    /// Some of many boundaries are passed over. No hit has a block missing in a group, and questions are few.
    #[test]
    fn of_many_boundaries_only_so_many_are_tried() {
        let mut missed = 0;
        for seed in 0..CASES {
            let case = case(seed, 300);
            let (served, _, questions) = case.serve(None);
            let ServedTokens::To(end) = served else { panic!("{seed}: all groups know") };
            assert!(case.has(end, &[true, false]), "{seed}: {case:?}");
            assert!(end == case.limit || end.is_multiple_of(case.set.unit), "{seed}: {case:?}");
            let right = case.highest(case.tried.unwrap_or(case.limit), &[true, false]);
            assert!((case.first..=right).contains(&end), "{seed}: {case:?}");
            assert!(questions <= (TRIES_MAX + 1) * GROUPS_MAX as u32, "{seed}: {questions}");
            missed += u64::from(end < right);
        }
        assert!((1..CASES / 10).contains(&missed), "{missed}");
    }

    /// Asked again from the tried boundary, the answer is the same.
    #[test]
    fn what_is_pending_goes_on_where_it_was() {
        let mut resumed = 0;
        for seed in 0..CASES {
            let mut case = case(seed, u64::from(TRIES_IN_TURN) - 2);
            let (right, ..) = case.serve(None);
            let late = seed as usize % case.set.forms.len();
            if let (ServedTokens::Pending(tried), ..) = case.serve(Some(late)) {
                resumed += u64::from(tried.is_some_and(|tried| tried < case.limit));
                case.tried = tried;
                assert_eq!(case.serve(None).0, right, "{seed}: {case:?}");
            }
        }
        assert!(resumed > CASES / 100, "{resumed}");
    }

    /// With a drafter the last state of a prompt lies before its last block; windows are read there, too.
    #[test]
    fn the_last_point_is_where_the_last_state_is() {
        let form = |kind| GroupForm { kind, block_tokens: 4, hashes_each: 1, key_tokens: 4, window: 9 };
        let window = GroupKind::Window { reads: 2 };
        for (other, drops, first) in
            [(GroupKind::State, true, 6), (GroupKind::State, false, 7), (GroupKind::Full, true, 7)]
        {
            let forms = [GroupKind::Full, window, other].map(form).to_vec();
            let points = Points::new(&GroupSet::new(forms, 0).dropping(drops), 1);
            let needed = points.needed(window, (0, 12), 9, [0, 0]).into_iter().flatten();
            assert!(needed.eq(first..12), "{other:?} {drops}");
        }
    }

    /// A later request reads, at each point, as many blocks as the window has; behind the prompt's last point every boundary is one.
    #[test]
    fn what_a_later_request_reads_is_saved() {
        for seed in 0..CASES {
            let random = &mut Random(seed);
            let (every, boundary, reads) = (below(random, 12), 1 + below(random, 4), 1 + below(random, 5));
            let dropped = if random.next().is_multiple_of(4) { boundary } else { 0 };
            let points = Points { every: every.next_multiple_of(boundary), boundary, dropped };
            let first = below(random, 30);
            let (end, prompt) = (first + below(random, 40), below(random, 60));
            let own = [below(random, 50), below(random, 50)];
            let last = (prompt - prompt % boundary).saturating_sub(dropped);
            let read = |block: &u32| {
                let of = |point: u32| point < last && (block + 1..=block + reads).contains(&point);
                let checkpoint = |point| points.every > 0 && point % points.every == 0 && of(point);
                let in_answer = |point| point >= last && point % boundary == 0;
                own.into_iter().any(of)
                    || (block + 1..=block + reads).any(|point| in_answer(point) || checkpoint(point))
            };
            let needed = points.needed(GroupKind::Window { reads }, (first, end), prompt, own);
            let right: Vec<u32> = (first..end).filter(read).collect();
            assert!(needed.windows(2).all(|parts| parts[0].end < parts[1].start), "{seed}: {needed:?}");
            assert_eq!(needed.into_iter().flatten().collect::<Vec<_>>(), right, "{seed}");
            let next = points.next_needed(GroupKind::Window { reads }, first.max(last));
            assert_eq!(Some(next), (first.max(last)..).find(read), "{seed}");
            assert_eq!(points.next_needed(GroupKind::Full, first), first, "{seed}");
            let full = points.needed(GroupKind::Full, (first, end), prompt, own);
            assert!(full.into_iter().flatten().eq(first..end), "{seed}");
        }
    }
}
