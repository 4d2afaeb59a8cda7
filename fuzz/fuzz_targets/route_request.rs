//! Bodies of clients of `pillion route`. The first byte chooses the API.
#![no_main]

use libfuzzer_sys::fuzz_target;
use router::fuzzed::read_request;

const PATHS: [&str; 5] =
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"];

fuzz_target!(|input: &[u8]| {
    let Some((&first, body)) = input.split_first() else { return };
    read_request(PATHS[usize::from(first) % PATHS.len()], body);
});
