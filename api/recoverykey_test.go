package api

import (
	"strings"
	"testing"
)

// A mistake is found before the key is tried, and no error has a part of the key.
func TestMistakesInARecoveryKey(t *testing.T) {
	t.Parallel()
	const key = "cbdefghi-jklnrtuv-cccccccc-bbbbbbbb-dddddddd-eeeeeeee-ffffffff-gggggggg"
	for typed, want := range map[string]string{
		"":                                     "has 0 groups instead of 8",
		key[:71-9]:                             "has 7 groups instead of 8",
		key + "-cbdefghi":                      "has 9 groups instead of 8",
		strings.Replace(key, "jkln", "jkl", 1): "group 2 of the recovery key has 7 characters instead of 8",
		strings.Replace(key, "-cccccccc", "-cccccccca", 1):      "group 3 of the recovery key has a character that isn't one of",
		strings.Replace(key, "gggggggg", "ggggggg1", 1):         "group 8 of the recovery key has a character",
		strings.Replace(key, "-", "", 1):                        "group 1 of the recovery key has 16 characters",
		strings.Repeat("cccccccc-", 8):                          "isn't random",
		strings.Replace(key, "cbdefghi", "cbdéfghi", 1):         "group 1 of the recovery key has a character",
		strings.ReplaceAll(strings.Repeat(key, 2), "-", "")[1:]: "group 1 of the recovery key has 127 characters",
	} {
		got, err := ParseRecoveryKey(typed)
		if got != "" || err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "jkln-") {
			t.Errorf("%q: %q, %v; want %q", typed, got, err, want)
		}
	}
}
