//! Handshake records. The first byte is the number of descriptors that came with the record.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shm_protocol::handshake::{Role, decode_hello, decode_reply, encode_record};

fuzz_target!(|input: &[u8]| {
    let Some((&descriptors, record)) = input.split_first() else { return };
    let descriptors = usize::from(descriptors);
    if let Ok(reply) = decode_reply(record) {
        assert_eq!(decode_reply(&encode_record(&reply)), Ok(reply));
    }
    let Ok(hello) = decode_hello(record, descriptors) else { return };
    assert_eq!(decode_hello(&encode_record(&hello), descriptors).as_ref(), Ok(&hello));
    if let Role::Worker(worker) = &hello.role {
        assert!(worker.block_bytes().is_some_and(|bytes| bytes > 0));
        let memories = worker.cuda.as_ref().map_or(descriptors, |cuda| cuda.allocations.len());
        for region in &worker.regions {
            assert!((region.fd as usize) < memories);
            let end = region.offset + u64::from(worker.blocks - 1) * region.stride + region.bytes;
            assert!(end <= worker.descriptor_bytes(region.fd));
            if let Some(cuda) = &worker.cuda {
                assert!(end <= cuda.allocations[region.fd as usize].bytes);
            }
        }
        if let Some(cuda) = &worker.cuda {
            assert!(cuda.cuts[0] > 0 && cuda.cuts.is_sorted_by(|one, next| one < next));
            assert_eq!(cuda.cuts.last().copied(), worker.block_bytes());
        }
    }
});
