//! Lines of `pillion keys`: whatever they are, the answer is one line of JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|line: &[u8]| {
    let answer = tools::keys::answer_question(line);
    assert!(!answer.contains('\n'));
    assert!(answer.starts_with("{\"none_hash\":\"") || answer.starts_with("{\"error\":\""), "{answer}");
});
