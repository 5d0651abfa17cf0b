package lists

import (
	"slices"
	"strconv"
	"testing"
)

func TestListOfAnother(t *testing.T) {
	t.Parallel()
	if made := Of([]int{3, 1, 2}, strconv.Itoa); !slices.Equal(made, []string{"3", "1", "2"}) {
		t.Errorf("made %q", made)
	}
	if made := Of(nil, strconv.Itoa); made != nil {
		t.Errorf("of nothing: %q, want nil", made)
	}
}
