use super::{Bundle, Kind, Served, serve};

const FULL: Bundle = Bundle { kind: Kind::Full, block_tokens: 2, eagle: false };

fn bundle(kind: Kind, block_tokens: u32) -> Bundle {
    Bundle { kind, block_tokens, eagle: false }
}

/// The answer where a bundle has the blocks that its text marks with `#`.
fn ask(bundles: &[(Bundle, &str)], from: u32, limit: u32) -> Option<Served> {
    let (bundles, blocks): (Vec<Bundle>, Vec<&str>) = bundles.iter().copied().unzip();
    let alignment = bundles.iter().map(|bundle| bundle.block_tokens).max().expect("there is a bundle");
    let present = |number: usize, block: u32| blocks[number].as_bytes().get(block as usize) == Some(&b'#');
    serve(&bundles, present, from, limit, alignment)
}

fn tokens(bundles: &[(Bundle, &str)], limit: u32) -> u32 {
    ask(bundles, 0, limit).map_or(0, |served| served.tokens)
}

#[test]
fn a_full_bundle_serves_its_leading_run_up_to_the_limit() {
    assert_eq!(tokens(&[(FULL, "###.#")], 10), 6);
    assert_eq!(tokens(&[(FULL, "#####")], 9), 8);
    assert_eq!(ask(&[(FULL, ".####")], 0, 10), None);
    assert_eq!(ask(&[(FULL, "")], 0, 0), None);
}

#[test]
fn a_window_needs_the_blocks_that_its_next_token_reads() {
    let window = |window| bundle(Kind::Window(window), 2);
    // Of 5 tokens the next one reads 4 before it, two blocks; of 6 it reads 5, three blocks.
    assert_eq!(tokens(&[(window(5), "...##.")], 12), 10);
    assert_eq!(tokens(&[(window(6), "...##.")], 12), 0);
    // One that begins with the prompt has all that there is.
    assert_eq!(tokens(&[(window(6), "##....")], 12), 4);
    // A window of its own token alone proves by one block that the prompt is the same.
    assert_eq!(tokens(&[(window(1), "...#..")], 12), 8);
}

#[test]
fn a_chunk_needs_what_it_has_begun() {
    let chunk = bundle(Kind::Chunk(4), 2);
    assert_eq!(tokens(&[(chunk, "....#.")], 10), 10);
    assert_eq!(tokens(&[(chunk, "......")], 10), 8);
}

#[test]
fn a_state_needs_the_block_that_ends_at_the_boundary() {
    assert_eq!(tokens(&[(bundle(Kind::State, 2), ".#.#..")], 12), 8);
    assert_eq!(tokens(&[(FULL, "###..."), (bundle(Kind::State, 2), ".#.#..")], 12), 4);
}

#[test]
fn a_draft_needs_a_block_more_and_does_not_load_it() {
    let draft = Bundle { eagle: true, ..FULL };
    let served = ask(&[(FULL, "####"), (draft, "####")], 0, 8).unwrap();
    assert_eq!(served, Served { tokens: 6, blocks: vec![0..3, 0..3] });
    // The block behind the limit is there to be looked for.
    assert_eq!(tokens(&[(FULL, "####"), (draft, "####")], 6), 6);
}

#[test]
fn what_is_with_the_asker_is_neither_needed_nor_loaded() {
    let window = bundle(Kind::Window(5), 2);
    let served = ask(&[(FULL, "..###"), (window, "..###")], 4, 10).unwrap();
    assert_eq!(served, Served { tokens: 10, blocks: vec![2..5, 3..5] });
    let served = ask(&[(FULL, "..#.."), (window, "..#..")], 4, 10).unwrap();
    assert_eq!(served, Served { tokens: 6, blocks: vec![2..3, 2..3] });
    assert_eq!(ask(&[(FULL, "##.##"), (window, "##.##")], 4, 10), None);
}

#[test]
fn boundaries_are_those_of_the_largest_block() {
    let large = bundle(Kind::Window(5), 4);
    assert_eq!(tokens(&[(FULL, "#####"), (large, "##")], 10), 8);
    assert_eq!(tokens(&[(FULL, "###.."), (large, "##")], 10), 4);
}

/// The blocks that a bundle must have for a boundary, told token by token.
fn required(bundle: &Bundle, from: u32, boundary: u32) -> Vec<u32> {
    let reads = |token: u32| match bundle.kind {
        Kind::Full => true,
        Kind::Window(window) => token + window > boundary || token + 1 == boundary,
        Kind::Chunk(chunk) => token / chunk == boundary / chunk,
        Kind::State => token + 1 == boundary,
    };
    let mut blocks: Vec<u32> = (from..boundary).filter(|token| reads(*token)).collect();
    blocks.iter_mut().for_each(|token| *token /= bundle.block_tokens);
    blocks.dedup();
    blocks
}

#[test]
fn every_cache_of_two_bundles_is_answered_by_the_definition() {
    const TOKENS: u32 = 8;
    let kinds = [Kind::Full, Kind::Window(1), Kind::Window(6), Kind::Chunk(4), Kind::State];
    let bundles = kinds.iter().flat_map(|kind| [(2, false), (2, true), (4, false)].map(|with| (*kind, with)));
    let bundles: Vec<Bundle> =
        bundles.map(|(kind, (block_tokens, eagle))| Bundle { kind, block_tokens, eagle }).collect();
    let mut hits = 0;
    for (first, second) in bundles.iter().flat_map(|first| bundles.iter().map(move |second| (first, second)))
    {
        let both = [*first, *second];
        let alignment = first.block_tokens.max(second.block_tokens);
        let blocks = both.map(|bundle| TOKENS / bundle.block_tokens);
        for cache in 0..1u32 << (blocks[0] + blocks[1]) {
            let bit = |number: usize, block: u32| {
                block < blocks[number] && cache >> (block + blocks[0] * number as u32) & 1 == 1
            };
            for (from, limit) in [(0, TOKENS), (0, TOKENS - 1), (4, TOKENS)] {
                let serves = |boundary: &u32| {
                    both.iter().enumerate().all(|(number, bundle)| {
                        let behind = bundle.eagle.then_some(boundary / bundle.block_tokens);
                        required(bundle, from, *boundary)
                            .into_iter()
                            .chain(behind)
                            .all(|block| bit(number, block))
                    })
                };
                let boundaries = (from + 1..=limit).rev().filter(|tokens| tokens % alignment == 0);
                let right = boundaries.into_iter().find(serves).map(|tokens| Served {
                    tokens,
                    blocks: both
                        .map(|bundle| range(&required(&bundle, from, tokens), tokens / bundle.block_tokens))
                        .to_vec(),
                });
                let mut asked = [0_u32; 2];
                let present = |number: usize, block| {
                    assert_eq!(asked[number] >> block & 1, 0, "block {block} is asked for twice");
                    asked[number] |= 1_u32 << block;
                    bit(number, block)
                };
                assert_eq!(
                    serve(&both, present, from, limit, alignment),
                    right,
                    "{both:?} {cache:b} {from}..{limit}"
                );
                hits += u32::from(right.is_some());
            }
        }
    }
    assert!(hits > 5_000, "{hits} caches have served anything");
}

fn range(blocks: &[u32], end: u32) -> std::ops::Range<u32> {
    blocks.first().copied().unwrap_or(end)..end
}
