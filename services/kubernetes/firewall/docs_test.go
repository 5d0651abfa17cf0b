package firewall

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
)

var (
	example  = regexp.MustCompile("(?ms)^```yaml\nmachine:\n(.*?)^```$")
	ownNames = regexp.MustCompile(`\b(pods|strangers)-to-[a-z]+\b`)
)

// What docs/firewall.md shows is accepted by the checks and by the kernel, and its tables name what there is.
func TestDocument(t *testing.T) {
	page, err := os.ReadFile("../../../docs/firewall.md")
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := config.NewSecrets(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, name := range ownNames.FindAllString(string(page), -1) {
		named[name] = false
	}
	examples := example.FindAllStringSubmatch(string(page), -1)
	if len(examples) != 4 {
		t.Errorf("%d examples, want 4", len(examples))
	}
	for _, found := range examples {
		c, err := config.Generate(config.Options{Type: config.ControlPlane, Endpoint: "https://10.5.0.2:6443", Secrets: secrets})
		if err != nil {
			t.Fatal(err)
		}
		text, err := c.Encode()
		if err != nil {
			t.Fatal(err)
		}
		c, _, err = config.Load("example", []byte(strings.Replace(string(text), "\nmachine:\n", "\nmachine:\n"+found[1], 1)))
		if err != nil {
			t.Errorf("%v in\n%s", err, found[1])
			continue
		}
		all := rules(c, addresses, controlPlanes)
		for _, r := range all {
			if ownNames.MatchString(r.name) {
				if _, there := named[r.name]; !there {
					t.Errorf("%s isn't in the document", r.name)
				}
				named[r.name] = true
			}
		}
		if os.Geteuid() == 0 {
			if err := (nft{}).replace(all, nil); err != nil {
				t.Errorf("%v for\n%s", err, found[1])
			}
		}
	}
	for name, there := range named {
		if !there {
			t.Errorf("no rule has the name %s", name)
		}
	}
	if os.Geteuid() == 0 {
		if err := (nft{}).replace(nil, nil); err != nil {
			t.Error(err)
		}
	}
}
