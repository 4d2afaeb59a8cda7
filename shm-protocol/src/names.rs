//! Enums with a name for each variant: labels of metrics, words of options, kinds of the protocol.

/// Defines an enum with an array of all variants and a name for each. The number of a variant is stated
/// behind `as`, or counted.
#[macro_export]
macro_rules! named {
    (
        $(#[$of_enum:meta])*
        $vis:vis enum $name:ident {
            $($(#[$of_variant:meta])* $variant:ident = $text:literal $(as $number:literal)?,)*
        }
    ) => {
        $(#[$of_enum])*
        #[derive(Copy, Clone, Debug, Eq, PartialEq)]
        $vis enum $name {
            $($(#[$of_variant])* $variant $(= $number)?,)*
        }

        #[allow(dead_code, reason = "few enums need all of these")]
        impl $name {
            /// Every variant, in the order of their numbers.
            $vis const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            /// Returns the variant's name.
            $vis const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// Returns the variant with this name, if there is one.
            $vis fn named(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|variant| variant.name() == name)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.name())
            }
        }
    };
}

#[cfg(test)]
mod tests {
    named! {
        enum Color {
            /// The color of fire.
            Red = "red",
            DarkBlue = "dark_blue",
        }
    }

    named! {
        enum Size {
            Large = "L" as 7,
        }
    }

    #[test]
    fn every_variant_is_there_with_its_name() {
        assert_eq!(Color::ALL, [Color::Red, Color::DarkBlue]);
        assert_eq!(Color::ALL.map(Color::name), ["red", "dark_blue"]);
        assert_eq!(Color::ALL.map(|color| color as usize), [0, 1]);
        assert_eq!((Color::named("dark_blue"), Color::named("blue")), (Some(Color::DarkBlue), None));
        assert_eq!((Size::Large.to_string(), Size::Large as usize), ("L".into(), 7));
    }
}
