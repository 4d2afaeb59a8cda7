//! Variables of the environment that look like options but are not.

use std::collections::BTreeSet;

/// Prefix of all options, and of some variables of Kubernetes for services.
const PREFIX: &str = "PILLION_";
/// Variables of this repository's scripts and tests, without the prefix: not options, and not mistyped.
const OF_SCRIPTS: [&str; 10] = [
    "BINARY",
    "GLIBC",
    "PROFILE",
    "SEED",
    "TARGET",
    "TIMES",
    "URL",
    "VENV",
    "WRITE_HEADER",
    "WRITE_INJECTED",
];
const OF_TESTS: &str = "TEST_";

/// Names in this process's environment that are probably mistyped options; `options` has all valid names.
pub fn find_mistyped(options: &BTreeSet<String>) -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| is_mistyped(name, options)).collect()
}

fn is_mistyped(name: &str, options: &BTreeSet<String>) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| {
        let is_of_scripts = OF_SCRIPTS.contains(&rest) || rest.starts_with(OF_TESTS);
        !options.contains(name) && !is_of_scripts && !is_of_a_service(name)
    })
}

/// True for a variable of Kubernetes: for a service `pillion-a` it sets PILLION_A_SERVICE_HOST,
/// PILLION_A_PORT_9440_TCP and similar ones.
fn is_of_a_service(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.contains("_PORT_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_option_has_is_mistyped_unless_kubernetes_or_a_script_sets_it() {
        let options = BTreeSet::from(["PILLION_SOCKET".to_owned()]);
        for name in ["PILLION_SOCK", "PILLION_", "PILLION_PORTS", "PILLION_BINARYS"] {
            assert!(is_mistyped(name, &options), "{name}");
        }
        for name in [
            "PILLION_SOCKET",
            "PATH",
            "PILLION_BINARY",
            "PILLION_TEST_SEED",
            "PILLION_SERVICE_HOST",
            "PILLION_SERVICE_PORT",
            "PILLION_MESH_SERVICE_PORT_FETCH",
            "PILLION_PORT",
            "PILLION_MESH_PORT_9441_TCP_ADDR",
        ] {
            assert!(!is_mistyped(name, &options), "{name}");
        }
    }
}
