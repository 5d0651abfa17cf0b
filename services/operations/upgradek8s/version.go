package upgradek8s

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"

	"github.com/garboard-os/garboard/config"
)

// minor is the second number of a version that is valid: 37 of v1.37.2.
func minor(version string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(semver.MajorMinor(version), "v1."))
	if err != nil {
		panic(fmt.Sprintf("version %q: %v", version, err)) // config.CheckKubernetesVersion has checked it
	}
	return n
}

// skew refuses a change that Kubernetes doesn't support: its components work together over
// one minor version, and an API server reads what the next one has stored, as a new
// storage version is readable by the release before
// (https://kubernetes.io/docs/reference/using-api/deprecation-policy/, rule 4b).
func skew(from, to string) error {
	for _, v := range []string{from, to} {
		if err := config.CheckKubernetesVersion(v); err != nil {
			return err
		}
	}
	switch steps := minor(to) - minor(from); {
	case steps > 1:
		return fmt.Errorf("from %s to %s is more than one minor version: upgrade to the latest v1.%d first", from, to, minor(from)+1)
	case steps < -1:
		return fmt.Errorf("from %s down to %s is more than one minor version: the older API server can't read all that the newer one has stored in etcd; go down to v1.%d first", from, to, minor(from)-1)
	}
	return nil
}

// down is a change to an older version.
func down(from, to string) bool { return semver.Compare(to, from) < 0 }
