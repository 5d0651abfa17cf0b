package boot

import (
	"strings"

	"github.com/garboard-os/garboard/config"
)

// Names of Garboard's kernel parameters.
const (
	ParamConfig   = "garboard.config"
	ParamPlatform = "garboard.platform"
)

// DataURL begins a value of ParamConfig that is the document itself.
const DataURL = "data:"

// Param is one kernel parameter. Value is empty for a flag such as quiet.
type Param struct{ Key, Value string }

// String is the parameter as it is on a command line.
func (p Param) String() string {
	text := p.Key
	if p.Value != "" {
		text += "=" + p.Value
	}
	if strings.ContainsAny(text, blanks) {
		return `"` + text + `"`
	}
	return text
}

// Cmdline is the kernel command line.
type Cmdline struct {
	// Params is everything up to "--", in order.
	Params []Param
}

// ParseCmdline reads /proc/cmdline as the kernel does (kernel-parameters in its
// documentation). Double quotes protect blanks, around a value or a whole
// parameter. There are no escapes. The part after "--" is for init, but isn't
// used here. It never fails: an unclosed quote lasts to the end.
func ParseCmdline(line string) Cmdline {
	var c Cmdline
	for line = strings.TrimSpace(line); line != ""; {
		var word string
		if word, line = nextWord(line); word == "--" {
			break
		}
		word = unquote(word)
		key, value, _ := strings.Cut(word, "=")
		c.Params = append(c.Params, Param{Key: key, Value: unquote(value)})
	}
	return c
}

// Credentials reports whether this is the place of the configuration with what opens that: a
// password or a token in the URL, or the whole document. Every pod can read the command line.
func (p Param) Credentials() bool {
	return p.Key == ParamConfig && (strings.HasPrefix(p.Value, DataURL) || config.RedactText(p.Value) != p.Value)
}

// nextWord cuts at the first blank outside of quotes.
func nextWord(line string) (word, rest string) {
	quoted := false
	for i, r := range line {
		switch {
		case r == '"':
			quoted = !quoted
		case !quoted && isBlank(r):
			return line[:i], strings.TrimLeft(line[i:], blanks)
		}
	}
	return line, ""
}

const blanks = " \t\r\n"

func isBlank(r rune) bool { return strings.ContainsRune(blanks, r) }

// unquote removes one pair of quotes from the ends, or one unclosed quote.
func unquote(s string) string {
	if bare, ok := strings.CutPrefix(s, `"`); ok {
		return strings.TrimSuffix(bare, `"`)
	}
	return s
}

// Get is the value of the last parameter of that name, which is the valid one,
// and whether there is any. As for the kernel, - and _ are the same.
func (c Cmdline) Get(key string) (value string, given bool) {
	for _, v := range c.All(key) {
		value, given = v, true
	}
	return value, given
}

// All is the values of all parameters of that name, in order.
func (c Cmdline) All(key string) (values []string) {
	for _, p := range c.Params {
		if sameKey(p.Key, key) {
			values = append(values, p.Value)
		}
	}
	return values
}

func sameKey(a, b string) bool {
	return strings.ReplaceAll(a, "-", "_") == strings.ReplaceAll(b, "-", "_")
}
