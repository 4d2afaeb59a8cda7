//! Each option is stated once: its flag, variable, key of the file, default and help come from one entry.

use clap::Arg;

/// Defines options, each a flag, a variable and a key of a file, and a second struct with their defaults in
/// place of absent values.
macro_rules! options {
    (
        $(#[$of_given:meta])* pub struct $given:ident;
        $(#[$of_settled:meta])* $vis:vis struct $settled:ident;
        $($(#[$of_field:meta])* $field:ident: $type:ident $(<$of:ty>)? $(= $default:expr)?,)*
    ) => {
        $(#[$of_given])*
        #[derive(clap::Args, Clone, Debug, Default, serde::Deserialize)]
        #[command(mut_args = Self::describe)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct $given {
            $($(#[$of_field])* pub $field: $type $(<$of>)?,)*
        }

        $(#[$of_settled])*
        #[derive(Clone, Debug)]
        #[allow(dead_code, reason = "some are read as they were given")]
        $vis struct $settled {
            $(pub $field: settled_type!($type $(<$of>)? $(= $default)?),)*
        }

        impl $given {
            /// These options, completed by `other`.
            pub fn or(self, other: Self) -> Self {
                #[allow(unused_imports, reason = "an Option has such a method itself")]
                use $crate::config::layers::Or;
                Self { $($field: self.$field.or(other.$field),)* }
            }

            /// These options with their defaults.
            $vis fn settle(self) -> $settled {
                $settled { $($field: settled_value!(self.$field $(, $default)?),)* }
            }

            fn describe(arg: clap::Arg) -> clap::Arg {
                match arg.get_id().as_str() {
                    $(stringify!($field) => {
                        $crate::config::layers::describe_option(arg, default_text!($type $(<$of>)? $(= $default)?))
                    })*
                    _ => arg,
                }
            }
        }
    };
}

macro_rules! settled_type {
    (Option<$of:ty> = $default:expr) => {
        $of
    };
    ($given:ty) => {
        $given
    };
}

macro_rules! settled_value {
    ($given:expr, $default:expr) => {
        $given.unwrap_or_else(|| $default)
    };
    ($given:expr) => {
        $given
    };
}

macro_rules! default_text {
    (Option<$of:ty> = $default:expr) => {{
        let default: $of = $default;
        Some(format!("{default:#}"))
    }};
    ($given:ty) => {
        None
    };
}

/// Lists in two layers: an empty list is replaced by the other.
pub(super) trait Or {
    fn or(self, other: Self) -> Self;
}

impl<T> Or for Vec<T> {
    fn or(self, other: Self) -> Self {
        if self.is_empty() { other } else { self }
    }
}

/// Adds to an argument its variable, named after its flag, and its default after the first paragraph of its
/// help. A switch without a value means true, and its help shows no default.
pub(super) fn describe_option(arg: Arg, default: Option<String>) -> Arg {
    let flag = arg.get_long().expect("every option has a flag");
    let variable = format!("PILLION_{}", flag.to_uppercase().replace('-', "_"));
    let arg = arg.env(variable);
    if arg.get_value_parser().type_id() == std::any::TypeId::of::<bool>() {
        return arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .value_name("true|false");
    }
    let Some(default) = default else { return arg };
    let stated = |help: &clap::builder::StyledStr| {
        let help = help.to_string();
        let (first, rest) = help.split_at(help.find("\n\n").unwrap_or(help.len()));
        format!("{first} [default: {default}]{rest}")
    };
    let (short, long) = (arg.get_help().map(stated), arg.get_long_help().map(stated));
    let arg = short.into_iter().fold(arg, Arg::help);
    long.into_iter().fold(arg, Arg::long_help)
}
