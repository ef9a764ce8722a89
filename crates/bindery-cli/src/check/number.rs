//! Numbers of a script: `0x40000000`, `2M`, `a+2M-4K`, `-1`.

use super::mistake::{Mistake, Place};

/// A sum of numbers and names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Value {
    pub place: Place,
    terms: Vec<Term>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Term {
    place: Place,
    minus: bool,
    what: What,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum What {
    Number(u64),
    Name(String),
}

impl Value {
    /// Reads a sum that the grammar has found.
    ///
    /// # Errors
    /// A number that does not fit into 64 bits.
    pub fn read(text: &str, place: Place) -> Result<Self, Mistake> {
        let mut terms = Vec::new();
        let mut start = 0;
        while start < text.len() {
            let minus = text[start..].starts_with('-');
            start += text[start..].len() - text[start..].trim_start_matches(['+', '-']).len();
            let length = text[start..].find(['+', '-']).unwrap_or(text.len() - start);
            let (word, place) = (&text[start..start + length], place.part(start, start + length));
            let what = if word.starts_with(|c: char| c.is_ascii_digit()) {
                What::Number(number(word, place)?)
            } else {
                What::Name(word.to_owned())
            };
            terms.push(Term { place, minus, what });
            start += length;
        }
        Ok(Self { place, terms })
    }

    /// The names in it, and their positions.
    pub fn names(&self) -> impl Iterator<Item = (&str, Place)> {
        self.terms.iter().filter_map(|term| match &term.what {
            What::Name(name) => Some((&**name, term.place)),
            What::Number(_) => None,
        })
    }

    /// The name, if it is only a name.
    pub fn as_name(&self) -> Option<&str> {
        match &*self.terms {
            [Term { minus: false, what: What::Name(name), .. }] => Some(name),
            _ => None,
        }
    }

    /// The sum, with the values of names from `look_up`. A leading minus yields the two's
    /// complement, as for a negative argument of a program.
    ///
    /// # Errors
    /// The error of `look_up`; a sum that does not fit into 64 bits, or is negative without a
    /// leading minus.
    pub fn evaluate<E: From<Mistake>>(
        &self,
        look_up: impl Fn(&str, Place) -> Result<u64, E>,
    ) -> Result<u64, E> {
        let mut sum = 0_i128;
        for term in &self.terms {
            let value = match &term.what {
                What::Number(number) => *number,
                What::Name(name) => look_up(name, term.place)?,
            };
            sum += if term.minus { -i128::from(value) } else { i128::from(value) };
        }
        let negative = self.terms.first().is_some_and(|term| term.minus);
        let fitting = match i64::try_from(sum) {
            Ok(sum) if sum >= 0 || negative => Some(sum as u64),
            Ok(_) => None,
            Err(_) => u64::try_from(sum).ok(),
        };
        fitting.ok_or_else(|| {
            let what = if sum < 0 { "is below zero" } else { "does not fit into 64 bits" };
            let message = format!("the sum {what}: {}", in_hexadecimal(sum));
            Mistake::new(self.place, message).into()
        })
    }

    /// As [`Value::evaluate`], for a byte.
    ///
    /// # Errors
    /// The errors of [`Value::evaluate`]; a number above 255.
    pub fn byte<E: From<Mistake>>(
        &self,
        look_up: impl Fn(&str, Place) -> Result<u64, E>,
    ) -> Result<u8, E> {
        let value = self.evaluate(look_up)?;
        u8::try_from(value).map_err(|_| {
            Mistake::new(self.place, format!("{value:#x} does not fit into a byte")).into()
        })
    }
}

fn in_hexadecimal(sum: i128) -> String {
    let sign = if sum < 0 { "-" } else { "" };
    format!("{sign}{:#x}", sum.unsigned_abs())
}

/// One number: hexadecimal, or decimal with K, M, G or T; underscores separate digits.
///
/// # Errors
/// If the number does not fit into 64 bits.
pub fn number(text: &str, place: Place) -> Result<u64, Mistake> {
    let digits = text.replace('_', "");
    let value = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => decimal(&digits),
    };
    value.ok_or_else(|| Mistake::new(place, format!("`{text}` does not fit into 64 bits")))
}

fn decimal(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().next_back()? {
        (end, 'K' | 'k') => (&text[..end], 10),
        (end, 'M' | 'm') => (&text[..end], 20),
        (end, 'G' | 'g') => (&text[..end], 30),
        (end, 'T' | 't') => (&text[..end], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { line: 1, start: 10, end: 20 };

    fn sum(text: &str) -> Result<u64, String> {
        let names = |name: &str, _| match name {
            "a" => Ok(0x4000_0000),
            "top" => Ok(u64::MAX),
            _ => Err(Mistake::new(PLACE, "unknown")),
        };
        let sum = Value::read(text, PLACE).and_then(|value| value.evaluate(names));
        sum.map_err(|mistake| mistake.message)
    }

    #[test]
    fn numbers_are_read_in_every_spelling() {
        assert_eq!((sum("0x4000_0000"), sum("0xffffffffffffffff")), (Ok(1 << 30), Ok(u64::MAX)));
        assert_eq!((sum("4K"), sum("2m"), sum("3G"), sum("1T")), {
            (Ok(4096), Ok(2 << 20), Ok(3 << 30), Ok(1 << 40))
        });
        assert_eq!(sum("1_000"), Ok(1000));
    }

    #[test]
    fn sums_add_and_subtract_from_left_to_right() {
        assert_eq!(sum("a+2M-4K"), Ok(0x401f_f000));
        assert_eq!(sum("4K-a+a"), Ok(4096), "what lies between may be anything");
        assert_eq!(sum("-1"), Ok(u64::MAX));
        assert_eq!(sum("-4K"), Ok(0xffff_ffff_ffff_f000));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let wrong = "does not fit into 64 bits";
        assert_eq!(sum("18446744073709551616"), Err(format!("`18446744073709551616` {wrong}")));
        assert_eq!(sum("16777216T"), Err(format!("`16777216T` {wrong}")));
        assert_eq!(sum("top+1"), Err(format!("the sum {wrong}: 0x10000000000000000")));
        assert_eq!(sum("4K-a"), Err("the sum is below zero: -0x3ffff000".to_owned()));
        assert!(sum("0x_").is_err(), "a number has digits");
    }

    #[test]
    fn the_parts_of_a_sum_have_places() {
        let value = Value::read("4K+abc-b", PLACE).unwrap();
        let names: Vec<_> = value.names().map(|(name, place)| (name, place.start)).collect();
        assert_eq!(names, [("abc", 13), ("b", 17)]);
        assert_eq!(value.as_name(), None);
        assert_eq!(Value::read("abc", PLACE).unwrap().as_name(), Some("abc"));
    }
}
