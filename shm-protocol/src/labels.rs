//! Enums whose variants are the values of a label of metrics.

/// Defines an enum, with all of its variants in an array and the label of each, so that none is left out of either.
#[macro_export]
macro_rules! labels {
    (
        $(#[$of_enum:meta])*
        $vis:vis enum $name:ident {
            $($(#[$of_variant:meta])* $variant:ident = $label:literal,)*
        }
    ) => {
        $(#[$of_enum])*
        $vis enum $name {
            $($(#[$of_variant])* $variant,)*
        }

        impl $name {
            /// Every variant, in the order of their numbers.
            $vis const ALL: [Self; [$($label),*].len()] = [$(Self::$variant),*];

            /// Its name in metrics.
            $vis fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)*
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    labels! {
        #[derive(Copy, Clone, Debug, Eq, PartialEq)]
        enum Color {
            /// The color of fire.
            Red = "red",
            DarkBlue = "dark_blue",
        }
    }

    #[test]
    fn every_variant_is_there_with_its_label() {
        assert_eq!(Color::ALL, [Color::Red, Color::DarkBlue]);
        assert_eq!(Color::ALL.map(Color::name), ["red", "dark_blue"]);
        assert_eq!(Color::ALL.map(|color| color as usize), [0, 1]);
    }
}
