package client

import (
	"regexp"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/api"
)

func TestRecoveryKey(t *testing.T) {
	t.Parallel()
	key := NewRecoveryKey()
	if !regexp.MustCompile(`^[cbdefghijklnrtuv]{8}(-[cbdefghijklnrtuv]{8}){7}$`).MatchString(key) || key == NewRecoveryKey() {
		t.Fatalf("%s", key)
	}
	for _, typed := range []string{
		key, strings.ToUpper(key), " " + key + "\r\n", strings.ReplaceAll(key, "-", " "), strings.ReplaceAll(key, "-", ""), strings.ReplaceAll(key, "-", " - "),
	} {
		if got, err := api.ParseRecoveryKey(typed); got != key || err != nil {
			t.Errorf("%q: %q, %v", typed, got, err)
		}
	}
}
