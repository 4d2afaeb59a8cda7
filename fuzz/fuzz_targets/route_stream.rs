//! Streams of events from engines to `pillion route`. The first byte is the length of their frames.
#![no_main]

use libfuzzer_sys::fuzz_target;
use router::fuzzed::judge_stream;

fuzz_target!(|input: &[u8]| {
    let Some((&frame_bytes, stream)) = input.split_first() else { return };
    assert_eq!(judge_stream(stream, usize::from(frame_bytes)), judge_stream(stream, usize::MAX));
});
