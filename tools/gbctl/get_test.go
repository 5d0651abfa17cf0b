package main

import (
	"strings"
	"testing"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Documents say since when an object is there, and since when it has problems.
func TestDocumentHasTimes(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, tc := range []struct {
		problems *timestamppb.Timestamp
		want     string
	}{{nil, "    created: \"2026-01-02T03:04:05Z\"\nspec: {}\n"}, {timestamppb.New(at.Add(time.Second)), "    created: \"2026-01-02T03:04:05Z\"\n    problemsSince: \"2026-01-02T03:04:06Z\"\nspec: {}\n"}} {
		document, err := envelope("10.5.0.2", &apiv1.Resource{Id: "eth0", Created: timestamppb.New(at), ProblemsSince: tc.problems})
		if err != nil {
			t.Fatal(err)
		}
		text, err := yaml.Marshal(document)
		if err != nil || !strings.HasSuffix(string(text), tc.want) {
			t.Errorf("%v\n%s", err, text)
		}
	}
}
