//! Requests of a trace, with the keys of a model's blocks.

use std::collections::HashSet;
use std::fs;

use shm_protocol::key::BlockHash;
use shm_protocol::random::{Random, mix_bits};

/// Tokens of a block of the trace.
const TRACE_TOKENS: u32 = 512;

/// A request.
pub(crate) struct Request {
    /// A number for the way its answer ended; 0: not known.
    pub(crate) way: u32,
    /// Tokens of its prompt, and of its prompt and answer.
    pub(crate) prompt: u32,
    pub(crate) total: u32,
    /// The keys of its whole blocks with KV.
    pub(crate) keys: Vec<BlockHash>,
}

/// Reads a file with a line for each request: its way, the tokens of its prompt and of all, and the numbers of its blocks in the trace.
/// Equal numbers are equal blocks behind equal blocks, so that of a block's last token is a key.
pub(crate) fn read(path: &str, block_tokens: u32) -> Vec<Request> {
    assert!(block_tokens >= TRACE_TOKENS, "two blocks would have one key");
    let text = fs::read_to_string(path).expect("a readable file");
    let request = |line: &str| {
        let numbers: Vec<i64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
        let [way, prompt, total, ids @ ..] = &numbers[..] else { panic!("a line has three numbers or more") };
        let (prompt, total) = (*prompt as u32, *total as u32);
        let key = |block: u32| {
            let number = ids[(((block + 1) * block_tokens - 1) / TRACE_TOKENS) as usize];
            // Several blocks of one answer may have one number.
            let mut random = Random(mix_bits(number as u64) ^ u64::from(block));
            BlockHash::from_words(std::array::from_fn(|_| random.next()))
        };
        let keys = (0..(total - 1) / block_tokens).map(key).collect();
        Request { way: *way as u32, prompt, total, keys }
    };
    text.lines().map(request).collect()
}

/// Number of distinct blocks.
pub(crate) fn distinct(requests: &[Request]) -> u64 {
    requests.iter().flat_map(|request| &request.keys).collect::<HashSet<_>>().len() as u64
}
