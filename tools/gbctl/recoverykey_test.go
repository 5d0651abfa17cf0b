package main

import (
	"io"
	"strings"
	"testing"
)

// typist answers with a part of the key that it reads.
type typist struct {
	keys io.Writer
	part func(key string) string
}

func (p typist) Write(text []byte) (int, error) {
	go io.WriteString(p.keys, p.part(strings.TrimSpace(string(text)))+"\n")
	return len(text), nil
}

// Only who types the last group of a new key has it.
func TestNewRecoveryKeyIsTyped(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		part func(key string) string
		sent bool
	}{
		"the last group":         {func(key string) string { return key[len(key)-8:] }, true},
		"in capitals":            {func(key string) string { return " " + strings.ToUpper(key[len(key)-8:]) }, true},
		"the first group":        {func(key string) string { return key[:8] }, false},
		"a part of the last one": {func(key string) string { return key[len(key)-7:] }, false},
		"nothing":                {func(string) string { return "" }, false},
	} {
		in, keys := io.Pipe()
		a := &app{in: in, out: typist{keys, tc.part}, err: io.Discard}
		if key, err := a.newRecoveryKey(t.Context()); (err == nil) != tc.sent || (key != "") != tc.sent {
			t.Errorf("%s: %q, %v", name, key, err)
		}
	}
}
