//! Lines of `pillion keys`: the answer to any line is one line of JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|line: &[u8]| {
    let answer = tools::keys::answer(line);
    assert!(!answer.contains('\n'));
    assert!(answer.starts_with("{\"none_hash\":\"") || answer.starts_with("{\"error\":\""), "{answer}");
});
