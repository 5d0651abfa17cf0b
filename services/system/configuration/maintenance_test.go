package configuration

import "testing"

// Maintenance mode, in which anybody may give a node its configuration, stays closed in these cases, and opens in all
// others.
func TestMaintenanceModeOfANodeWithAConfiguration(t *testing.T) {
	t.Parallel()
	closed := map[string]func(f facts) bool{
		"the disk or the TPM of this boot may still come":           func(f facts) bool { return f.state == StateLate },
		"this system is installed, so its disk has a configuration": func(f facts) bool { return f.installed && f.state == StateBroken },
		// However the machine was started: whoever can reach it must neither take its disk nor give it a configuration
		// with which the secrets on STATE would be his. It takes the recovery key, and nothing else (Locked).
		"STATE has a configuration that its recovery key opens":              func(f facts) bool { return f.state == StateLocked },
		"a reset goes on first":                                              func(f facts) bool { return f.state == StateWiping },
		"STATE has a configuration that can't be read now":                   func(f facts) bool { return f.unsettled || f.text == textLost },
		"the former system can read the configuration":                       func(f facts) bool { return f.text == textBroken && f.trial },
		"the node has had a configuration, and its source may give it again": func(f facts) bool { return f.elsewhere && f.had },
	}
	all, opened, told := 0, 0, map[string]bool{}
	for state := StateAbsent; state <= StateMounted; state++ {
		for text := textAbsent; text <= textLost; text++ {
			for bits := range 1 << 5 {
				is := func(n int) bool { return bits>>n&1 == 1 }
				f := facts{is(0), state, is(1), text, is(2), is(3), is(4)}
				want := true
				for _, holds := range closed {
					want = want && !holds(f)
				}
				open, why := mayOpenMaintenance(f)
				if open != want || open != (why == "") || !open && !closed[why](f) {
					t.Errorf("%+v: open %v (%s), want %v", f, open, why, want)
				}
				all++
				if told[why] = true; open {
					opened++
				}
			}
		}
	}
	// A row that closes it in fewer cases is a hole in the rule above, too.
	if all != 576 || opened != 45 || len(told) != len(closed)+1 {
		t.Errorf("of %d cases it opens in %d, for %d reasons", all, opened, len(told)-1)
	}
	if open, _ := mayOpenMaintenance(facts{}); !open {
		t.Error("a machine without a configuration can't be given one")
	}
}
