package release

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/image/version"
)

// subject is that of a commit: the packages, and what it does to them.
var subject = regexp.MustCompile(`^([\w./-]+)(?:, [\w./-]+)*: (.+)$`)

// changelog has the commits since the release before, by the first package that they name, as Markdown.
func (r *Release) changelog(ctx context.Context) (string, error) {
	tags, err := version.Git(ctx, r.Root, "tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname")
	if err != nil {
		return "", err
	}
	since, not := "the beginning", ""
	if before := slices.DeleteFunc(strings.Fields(tags), func(tag string) bool { return tag == r.Version }); len(before) > 0 {
		since, not = before[0], "^"+before[0]
	}
	log, err := version.Git(ctx, r.Root, strings.Fields("log --no-merges --format=%H%x20%s HEAD "+not)...)
	if err != nil {
		return "", err
	}
	groups := map[string][]string{}
	for line := range strings.Lines(log) {
		hash, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		group := "other"
		if m := subject.FindStringSubmatch(text); m != nil {
			group, text = m[1], m[2]
		}
		groups[group] = append(groups[group], fmt.Sprintf("- %s (%.12s)\n", text, hash))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Garboard %s, of %s\n\nChanges since %s.\n", r.Version, r.Date.Format(time.DateOnly), since)
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		fmt.Fprintf(&b, "\n## %s\n\n%s", group, strings.Join(groups[group], ""))
	}
	return b.String(), nil
}
