package slots

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// What opens the configuration on a server isn't in the boot entry of the disk, where every pod
// could read it. A place without credentials is, and so is one that each boot needs.
func TestCredentialsAreUsedOnce(t *testing.T) {
	t.Parallel()
	persist, not := true, false
	for _, tc := range []struct {
		place   string
		persist *bool
		want    bool
	}{
		{"http://me:hunter2@10.0.0.1/a", nil, false},
		{"http://10.0.0.1/a?token=hunter2", &persist, false},
		{"data:;base64,aHVudGVyMg==", nil, false},
		{"http://10.0.0.1/a?mac=1", nil, true},
		{"http://me:hunter2@10.0.0.1/a", &not, true},
	} {
		m := newMachine(t)
		m.insert("v1")
		m.from = tc.place
		s := m.boot("")
		must(t, configuration.Configs.Put(s.o.Store.As(configuration.ID), configuration.ConfigID, &config.Config{Persist: tc.persist}))
		must(t, m.write(s))
		entry, err := os.ReadFile(filepath.Join(m.dir, "efi/loader/entries/garboard-a+1.conf"))
		must(t, err)
		if got := strings.Contains(string(entry), "garboard.config="+tc.place); got != tc.want || !tc.want && strings.Contains(string(entry), "garboard.config") {
			t.Errorf("%s, persist %v:\n%s", tc.place, tc.persist, entry)
		}
		if !strings.Contains(string(entry), "garboard.platform=metal") {
			t.Errorf("other arguments are gone:\n%s", entry)
		}
	}
}
