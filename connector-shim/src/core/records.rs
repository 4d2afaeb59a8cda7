//! Records of requests with a question to the cache: the wait of each until its computation, by reason. One of so many records is kept, and
//! all slow ones.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use shm_protocol::source::Source;

use super::policy::RequestId;

shm_protocol::named! {
    /// A reason to wait.
    pub enum WaitPart {
        /// The cache's answer.
        Query = "query",
        /// The answer, once it was put off because another engine computes the prompt.
        Producer = "producer",
        /// Room in the engine.
        Room = "waiting",
        /// The blocks.
        Copy = "copy",
        /// The request's first step.
        Ready = "ready",
    }
}

shm_protocol::named! {
    /// The load of a recorded request.
    #[derive(Default)]
    pub enum RecordedLoad {
        /// There was none.
        #[default]
        Absent = "none",
        /// Its step waited for it.
        Sync = "sync",
        /// It was beside the steps.
        Async = "async",
        /// It failed.
        Failed = "failed",
    }
}

/// The records to keep.
#[derive(Copy, Clone, Debug)]
pub struct RecordOptions {
    /// One of so many; 0: none.
    pub every: u32,
    /// Each with a whole wait of at least this.
    pub slow: Duration,
    /// Steps scheduled before the output of the first of them is processed: a synchronous load has ended after so many.
    pub steps_in_flight: u64,
}

/// One request. Its parts follow each other, so they add up to the whole.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// The request.
    pub request: RequestId,
    /// Tokens of the prompt, and of a preempted request's answer.
    pub tokens: u32,
    /// Tokens of the prompt with their KV in the engine's own cache.
    pub computed: u32,
    /// Time in each part, by [`WaitPart::ALL`].
    pub times: [Duration; WaitPart::ALL.len()],
    /// Tokens of the hit.
    pub hit: u32,
    /// The same by the place of the hit; zeros where the places are unknown.
    pub found: [u32; Source::ALL.len()],
    /// Its load.
    pub load: RecordedLoad,
    /// It ended before it was computed.
    pub aborted: bool,
    part: WaitPart,
    since: Instant,
    beside: bool,
}

/// The records of waiting requests, and kept ones of computed requests.
#[derive(Debug)]
pub struct RequestRecords {
    options: RecordOptions,
    open: BTreeMap<RequestId, RequestRecord>,
    /// Requests beginning in the step being scheduled.
    begun: Vec<RequestId>,
    /// Requests with a synchronous load, each with the step to be scheduled after the load's end.
    loading: VecDeque<(u64, RequestId)>,
    count: u64,
    kept: Vec<RequestRecord>,
}

// === impl RequestRecord ===

impl RequestRecord {
    /// Ends the current part of the request's wait, and begins `part`.
    fn enter_part(&mut self, part: WaitPart, time: Instant) {
        self.times[self.part as usize] += time - self.since;
        (self.part, self.since) = (part, time);
    }

    /// The request's whole wait, up to the end of the last part.
    pub fn whole(&self) -> Duration {
        self.times.iter().sum()
    }
}

// === impl RequestRecords ===

impl RequestRecords {
    /// Begins without records.
    pub fn new(options: RecordOptions) -> Self {
        let (open, begun, loading) = (BTreeMap::new(), Vec::new(), VecDeque::new());
        Self { options, open, begun, loading, count: 0, kept: Vec::new() }
    }

    /// Notes that the cache is about to be asked for a request, perhaps again.
    pub fn asks(&mut self, request: RequestId, tokens: u32, computed: u32, time: Instant) {
        self.open.entry(request).or_insert_with(|| RequestRecord {
            request,
            tokens,
            computed,
            times: Default::default(),
            hit: 0,
            found: Default::default(),
            load: RecordedLoad::Absent,
            aborted: false,
            part: WaitPart::Query,
            since: time,
            beside: false,
        });
    }

    /// Notes the cache's answer. With `pending` the request goes on to wait for that; `beside`: its load is
    /// to run beside the steps.
    pub fn asked(&mut self, request: RequestId, pending: Option<WaitPart>, beside: bool, time: Instant) {
        if let Some(record) = self.open.get_mut(&request) {
            record.enter_part(pending.unwrap_or(WaitPart::Room), time);
            record.beside = beside;
        }
    }

    /// Notes the plan of a load of `hit` tokens.
    pub fn loads(&mut self, request: RequestId, hit: u32, time: Instant) {
        if let Some(record) = self.open.get_mut(&request) {
            record.enter_part(WaitPart::Copy, time);
            record.hit = hit;
            record.load = if record.beside { RecordedLoad::Async } else { RecordedLoad::Sync };
        }
    }

    /// Notes the places of the hit, if they are known.
    pub fn found(
        &mut self,
        request: RequestId,
        sources: impl FnOnce(u32) -> Option<[u32; Source::ALL.len()]>,
    ) {
        if let Some(record) = self.open.get_mut(&request) {
            record.found = sources(record.hit).unwrap_or_default();
        }
    }

    /// Notes that every rank has reported the end of these requests' loads.
    pub fn received(&mut self, requests: &[RequestId], time: Instant) {
        for request in requests {
            if let Some(record) = self.open.get_mut(request) {
                record.enter_part(WaitPart::Ready, time);
            }
        }
    }

    /// Notes failed loads: those of requests that are now refused by the cache.
    pub fn note_failed(&mut self, is_refused: impl Fn(RequestId) -> bool) {
        for (request, record) in &mut self.open {
            if is_refused(*request) {
                record.load = RecordedLoad::Failed;
            }
        }
    }

    /// Notes the requests that begin in the step being scheduled.
    pub fn begins(&mut self, requests: impl Iterator<Item = RequestId>) {
        self.begun.extend(requests);
    }

    /// Notes that the step is scheduled: the requests that begin in it are computed.
    pub fn scheduled(&mut self, step: u64, time: Instant) {
        for request in std::mem::take(&mut self.begun) {
            match self.open.get(&request).map(|record| record.load) {
                Some(RecordedLoad::Sync) => {
                    self.loading.push_back((step + self.options.steps_in_flight, request));
                }
                Some(_) => self.end_record(request, false, time),
                None => {}
            }
        }
        while let Some(&(ended, request)) = self.loading.front()
            && ended <= step
        {
            self.loading.pop_front();
            self.end_record(request, false, time);
        }
    }

    /// Notes the end of a request, perhaps before its computation.
    pub fn finished(&mut self, request: RequestId, aborted: bool, time: Instant) {
        self.end_record(request, aborted, time);
    }

    fn end_record(&mut self, request: RequestId, aborted: bool, time: Instant) {
        let Some(mut record) = self.open.remove(&request) else { return };
        self.loading.retain(|(_, loading)| *loading != request);
        record.enter_part(WaitPart::Ready, time);
        record.aborted = aborted;
        self.count += 1;
        let every = u64::from(self.options.every);
        if every > 0 && self.count.is_multiple_of(every) || record.whole() >= self.options.slow {
            self.kept.push(record);
        }
    }

    /// Takes the records kept since the last call.
    pub fn take_kept(&mut self) -> Vec<RequestRecord> {
        std::mem::take(&mut self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: RequestId = 1;
    const PART: Duration = Duration::from_millis(5);

    fn records(every: u32, slow: Duration) -> (RequestRecords, Instant) {
        #[expect(clippy::disallowed_methods, reason = "where a test's own time begins")]
        let now = Instant::now();
        (RequestRecords::new(RecordOptions { every, slow, steps_in_flight: 2 }), now)
    }

    fn part_times(record: &RequestRecord) -> Vec<(&'static str, u128)> {
        let times = WaitPart::ALL.into_iter().zip(record.times);
        times
            .filter(|(_, time)| !time.is_zero())
            .map(|(part, time)| (part.name(), time.as_millis()))
            .collect()
    }

    /// Tokens of which all were in the sidecar's memory.
    fn of_memory(tokens: u32) -> [u32; Source::ALL.len()] {
        Source::ALL.map(|source| if source == Source::Memory { tokens } else { 0 })
    }

    /// Each part lasts until the next one begins.
    #[test]
    fn parts_of_a_request_add_up() {
        let (mut records, mut now) = records(1, Duration::MAX);
        let mut later = || {
            now += PART;
            now
        };
        records.asks(ONE, 40, 16, later());
        records.asked(ONE, Some(WaitPart::Producer), false, later());
        records.asks(ONE, 41, 17, later());
        records.asked(ONE, None, true, later());
        records.loads(ONE, 24, later());
        records.found(ONE, |hit| Some(of_memory(hit)));
        records.received(&[ONE], later());
        records.begins([ONE].into_iter());
        records.scheduled(1, later());
        let kept = records.take_kept();
        let [record] = &kept[..] else { panic!("{kept:?}") };
        assert_eq!(
            part_times(record),
            [("query", 5), ("producer", 10), ("waiting", 5), ("copy", 5), ("ready", 5)]
        );
        assert_eq!((record.tokens, record.computed, record.hit, record.found), (40, 16, 24, of_memory(24)));
        assert_eq!((record.load, record.aborted, record.whole()), (RecordedLoad::Async, false, 6 * PART));
        assert!(records.take_kept().is_empty());
    }

    /// A step loads while it computes: the load has ended once its output was processed.
    #[test]
    fn a_synchronous_load_ends_with_its_step() {
        let (mut records, now) = records(1, Duration::MAX);
        records.asks(ONE, 40, 0, now);
        records.asked(ONE, None, false, now);
        records.loads(ONE, 32, now);
        records.begins([ONE].into_iter());
        records.scheduled(5, now);
        records.scheduled(6, now);
        assert!(records.take_kept().is_empty());
        records.scheduled(7, now + PART);
        let kept = records.take_kept();
        assert_eq!((kept[0].load, part_times(&kept[0])), (RecordedLoad::Sync, vec![("copy", 5)]));
    }

    /// A request preempted meanwhile asks again, for another record.
    #[test]
    fn a_record_that_ended_does_not_end_the_next_one_of_its_request() {
        let (mut records, now) = records(1, Duration::MAX);
        records.asks(ONE, 40, 0, now);
        records.asked(ONE, None, false, now);
        records.loads(ONE, 32, now);
        records.begins([ONE].into_iter());
        records.scheduled(5, now);
        records.finished(ONE, true, now);
        records.asks(ONE, 44, 0, now);
        records.scheduled(7, now);
        assert!(records.take_kept().iter().map(|kept| kept.aborted).eq([true]));
    }

    #[test]
    fn a_failed_load_is_told() {
        let (mut records, now) = records(1, Duration::MAX);
        for request in [ONE, 2] {
            records.asks(request, 40, 0, now);
            records.asked(request, None, true, now);
            records.loads(request, 32, now);
        }
        records.note_failed(|request| request == 2);
        records.begins([ONE, 2].into_iter());
        records.scheduled(1, now);
        let loads: Vec<_> = records.take_kept().iter().map(|kept| kept.load).collect();
        assert_eq!(loads, [RecordedLoad::Async, RecordedLoad::Failed]);
    }

    #[test]
    fn one_of_so_many_is_kept_and_each_slow_one() {
        let (mut records, now) = records(3, 2 * PART);
        for request in 0..7 {
            records.asks(request, 40, 0, now);
            let time = if request == 3 { now + 2 * PART } else { now + PART };
            records.finished(request, false, time);
        }
        let kept: Vec<_> = records.take_kept().iter().map(|kept| kept.request).collect();
        assert_eq!(kept, [2, 3, 5]);
    }
}
