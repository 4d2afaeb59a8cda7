//! The commands and options of clap, for docs/options.md (scripts/options).

use std::collections::BTreeSet;

use clap::{Arg, Command};
use serde_json::{Value, json};

/// clap's group of the options in a table of the configuration file, and that table.
const TABLE: (&str, &str) = ("MeshOptions", "mesh.");

/// The commands and options in --help, in its order; a command of a command goes behind it, as `ctl evict`.
pub fn list_commands(program: &Command) -> Vec<Value> {
    let shown =
        program.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help");
    shown.flat_map(|command| below(command, command.get_name())).collect()
}

/// The environment variables of all options of any command.
pub fn list_variables(program: &Command) -> BTreeSet<String> {
    let own =
        program.get_arguments().filter_map(Arg::get_env).map(|name| name.to_string_lossy().into_owned());
    own.chain(program.get_subcommands().flat_map(list_variables)).collect()
}

fn below(command: &Command, name: &str) -> Vec<Value> {
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string);
    let mut found = vec![json!({"name": name, "about": about, "options": options(command)})];
    for mut nested in list_commands(command) {
        nested["name"] = json!(format!("{name} {}", nested["name"].as_str().unwrap_or_default()));
        found.push(nested);
    }
    found
}

fn options(command: &Command) -> Vec<Value> {
    let shown = command.get_arguments().filter(|option| !option.is_hide_set() && option.get_id() != "help");
    shown.map(|option| described(command, option)).collect()
}

fn described(command: &Command, option: &Arg) -> Value {
    let names = option.get_value_names().filter(|_| option.get_action().takes_values()).unwrap_or_default();
    let values: Vec<_> = names.iter().map(ToString::to_string).collect();
    let help = option.get_long_help().or_else(|| option.get_help()).map(ToString::to_string);
    let defaults: Vec<_> = option.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    json!({
        "flag": option.get_long(),
        "values": values,
        "value_needed": option.get_num_args().is_none_or(|counts| counts.min_values() > 0),
        "variable": option.get_env().map(|name| name.to_string_lossy()),
        "key": file_key(command, option),
        "required": option.is_required_set(),
        "default": defaults.join(","),
        "help": help,
    })
}

/// The option's key in the file of --config; only `serve` has one. Every option in the file has a variable,
/// too.
fn file_key(command: &Command, option: &Arg) -> Option<String> {
    if command.get_name() != "serve" || option.get_env().is_none() {
        return None;
    }
    let (group, table) = TABLE;
    let tabled = command
        .get_groups()
        .any(|found| found.get_id() == group && found.get_args().any(|member| member == option.get_id()));
    Some(format!("{}{}", if tabled { table } else { "" }, option.get_id().as_str().replace('_', "-")))
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use sidecar::config::ServeOptions;

    #[test]
    fn every_key_is_one_of_the_file_and_every_option_of_the_file_has_one() {
        let mut serve = ServeOptions::augment_args(Command::new("serve"));
        serve.build();
        let options = serve.get_arguments().filter(|option| option.get_id() != "help");
        let keys: Vec<_> = options.map(|option| file_key(&serve, option).unwrap()).collect();
        assert!(keys.contains(&"pool-path".to_owned()) && keys.contains(&"mesh.cert-name".to_owned()));
        let taken = |key: &str| !toml::from_str::<ServeOptions>(&format!("{key} = {{}}")).is_err_and(unknown);
        for key in &keys {
            assert!(taken(key), "{key}");
        }
        assert!(!taken("mesh.pool-path") && !taken("cert-name"));
    }

    fn unknown(error: toml::de::Error) -> bool {
        error.to_string().contains("unknown field")
    }

    #[test]
    fn an_option_is_described_by_all_its_names() {
        let mut program =
            Command::new("pillion").subcommand(ServeOptions::augment_args(Command::new("serve")));
        program.build();
        let program = list_commands(&program);
        let serve = program[0]["options"].as_array().unwrap();
        let of = |flag: &str| serve.iter().find(|option| option["flag"] == flag).unwrap();
        let ssd = of("ssd");
        assert_eq!((&ssd["variable"], &ssd["key"]), (&json!("PILLION_SSD"), &json!("ssd")));
        assert_eq!(ssd["values"], json!(["PATH:SIZE[:create]"]));
        assert!(ssd["help"].as_str().unwrap().contains("pillion.log"), "{ssd}");
        assert_eq!((&ssd["value_needed"], &of("hugepages")["value_needed"]), (&json!(true), &json!(false)));
    }
    #[test]
    fn commands_of_a_command_go_behind_it_and_hidden_ones_are_left_out() {
        let inner = Command::new("inner").about("What it does").arg(clap::arg!(--level <LEVEL> "How much"));
        let outer = Command::new("outer").subcommand(inner).subcommand(Command::new("secret").hide(true));
        let mut program = Command::new("program").subcommand(outer).subcommand(Command::new("last"));
        program.build();
        let listed = list_commands(&program);
        let names: Vec<_> = listed.iter().map(|command| command["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["outer", "outer inner", "last"]);
        assert_eq!(listed[1]["about"], "What it does");
        assert_eq!(listed[1]["options"][0]["flag"], "level");
    }
}
