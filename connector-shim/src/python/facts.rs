//! What engines state of themselves, for who has no vLLM to state it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use shm_protocol::namespace;

/// The digest of a directory's weight files, if it has any.
#[pyfunction]
pub(super) fn weight_files(py: Python<'_>, directory: PathBuf) -> PyResult<Option<String>> {
    Ok(py.detach(|| shm_protocol::weight_files::digest(&directory))?)
}

/// What two engines' facts do not agree on, the most telling first: name, ours, theirs, and what makes them agree.
#[pyfunction]
pub(super) fn differences(
    ours: BTreeMap<String, String>,
    theirs: BTreeMap<String, String>,
) -> Vec<(String, Option<String>, Option<String>, &'static str)> {
    let found = namespace::differences(&ours, &theirs);
    let owned = |value: Option<&str>| value.map(str::to_owned);
    found
        .into_iter()
        .map(|found| (found.name.to_owned(), owned(found.ours), owned(found.theirs), found.remedy))
        .collect()
}
