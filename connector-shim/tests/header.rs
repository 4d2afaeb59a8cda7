//! `include/pillion.h` must equal the header generated from the sources. PILLION_WRITE_HEADER=1 writes it.

use std::path::Path;

const SOURCES: [&str; 9] =
    ["error", "handle", "raw", "keys", "page", "scheduler", "handover", "worker", "engine"];

#[test]
fn the_header_is_what_the_sources_say() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let sources = SOURCES.iter().map(|source| folder.join(format!("src/c/{source}.rs")));
    let builder = cbindgen::Builder::new().with_config(config);
    let bindings = sources.fold(builder, cbindgen::Builder::with_src).generate().unwrap();
    let mut generated = Vec::new();
    bindings.write(&mut generated);
    let header = folder.join("include/pillion.h");
    if std::env::var_os("PILLION_WRITE_HEADER").is_some() {
        std::fs::write(&header, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&header).unwrap_or_default();
    assert!(
        committed.as_bytes() == generated,
        "{} is old: PILLION_WRITE_HEADER=1 cargo test -p connector-shim --test header",
        header.display()
    );
}
