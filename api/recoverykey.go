package api

import (
	"errors"
	"fmt"
	"strings"
)

const (
	// Modhex are the digits of a recovery key: on most keyboards, they are at the same places.
	Modhex = "cbdefghijklnrtuv"

	recoveryGroups, recoveryGroup = 8, 8
	// fewestDigits are in each random key, but for one of 10^12.
	fewestDigits = 8
)

// ParseRecoveryKey makes the passphrase of a recovery key that a person has typed: in any case, with or without hyphens
// and blanks. It has 256 random bits as 64 modhex characters, in groups of eight that hyphens separate, as
// systemd-cryptenroll(1) has them. The error says which group is wrong, and never has a part of the key.
func ParseRecoveryKey(text string) (string, error) {
	groups := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool { return r == '-' || r <= ' ' })
	if len(groups) == 1 && len(groups[0]) == recoveryGroups*recoveryGroup {
		all := groups[0]
		for groups = nil; all != ""; all = all[recoveryGroup:] {
			groups = append(groups, all[:recoveryGroup])
		}
	}
	seen := map[rune]bool{}
	for i, group := range groups {
		for _, r := range group {
			if seen[r] = true; !strings.ContainsRune(Modhex, r) {
				return "", fmt.Errorf("group %d of the recovery key has a character that isn't one of %s", i+1, Modhex)
			}
		}
		if len(group) != recoveryGroup {
			return "", fmt.Errorf("group %d of the recovery key has %d characters instead of %d", i+1, len(group), recoveryGroup)
		}
	}
	if len(groups) != recoveryGroups {
		return "", fmt.Errorf("the recovery key has %d groups instead of %d", len(groups), recoveryGroups)
	}
	if len(seen) < fewestDigits {
		return "", errors.New("the recovery key isn't random: gbctl recovery-key add makes one")
	}
	return strings.Join(groups, "-"), nil
}
